"""A stage goes on with the rows that its checkpoint was trained on, and with no others."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import parse_mesh
from rlhf_jax.data.batches import collate_text
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.tokenize import SftRow
from rlhf_jax.models.params import compute_layout
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.rows import check_same_rows
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.supervised import fit
from tests.models.cases import LLAMA


def loader_of(num_rows: int, first: int = 0) -> Loader[Any]:
    rows = [SftRow(np.array([first, n], np.int32), 1) for n in range(num_rows)]
    return Loader(rows, partial(collate_text, length=2), batch_size=2, seed=0)


def one_more(state: Any, batch: Any) -> Any:
    del batch
    return {"count": state["count"] + 1}, {"loss": jnp.ones(())}


def train(directory: Path, loader: Loader[Any], num_steps: int, *, resume: bool = False) -> float:
    """A stage that counts its steps."""
    run = Run(TrainConfig(output_dir=str(directory), resume=resume), parse_mesh("1x1"), 1)
    start: Any = {"count": jnp.zeros(())}
    end: Any
    end, _ = fit(
        run, "sft", start, loader, num_steps, compute_layout(LLAMA, run.mesh),
        update=one_more,
        evaluate=lambda state: {}, shown=("loss",),
    )  # fmt: skip
    return float(end["count"])


def test_a_resume_with_other_rows_is_refused_and_with_the_same_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path, loader_of(6), 1) == 1
    for other in (loader_of(4), loader_of(6, first=7)):
        both = f"{loader_of(6).fingerprint} then, {other.fingerprint} now. Put back"
        with pytest.raises(ValueError, match=f"other data: {re.escape(both)}"):
            train(tmp_path, other, 2, resume=True)
    assert train(tmp_path, loader_of(6), 2, resume=True) == 2


def test_a_checkpoint_that_does_not_say_its_rows_is_gone_on_with() -> None:
    check_same_rows("sft", {"stage": "sft", "step": 1}, {"data": loader_of(4).fingerprint})
