"""The loss of a batch of pairs, with the margins of the data in it; the scores' statistics."""

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshes.reshard import put_batch
from rlhf_jax.data.batches import collate_pairs
from rlhf_jax.data.tokenize import PairRow
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.stages.reward import pair_batch_loss
from rlhf_jax.stages.statistics_file import read_statistics, write_statistics
from rlhf_jax.stages.supervised_config import RewardConfig
from tests.engine.drive import Driver
from tests.models.cases import OPT

MARGINS = (0.0, 0.5, 3.0, 0.0)


def test_margins_of_the_data_are_taken_off_the_differences(tolerance) -> None:
    """From the scores that each pair has without them, which margins do not change."""
    driver, rng = Driver(OPT), np.random.default_rng(2)
    rows = [
        PairRow(*rng.integers(3, 99, (2, 6)).astype(np.int32), prompt_length=2, margin=margin)
        for margin in MARGINS
    ]
    settings = RewardConfig(center_coef=0.0, remat="none")
    layout = driver.engine.compute
    loss = driver.jit(partial(pair_batch_loss, cfg=settings, model=OPT, layout=layout))
    params, differences = driver.scalar(3), []
    for row in rows:
        _, metrics = loss(params, put_batch(collate_pairs([row], 8, length=8), layout))
        differences.append(float(metrics["score_chosen"] - metrics["score_rejected"]))
    batch = collate_pairs(rows, 8, length=8)
    for margins, used in ((MARGINS, batch), (0, replace(batch, margin_B=0 * batch.margin_B))):
        truth = np.mean(np.log1p(np.exp(-(np.array(differences) - margins))))
        found, _ = loss(params, put_batch(used, layout))
        np.testing.assert_allclose(found, truth, **tolerance(np.float32))


def test_statistics_are_those_of_both_answers_and_stay_whole_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, rejected = np.random.default_rng(0).normal(2, 3, (2, 50))
    means: dict[str, Any] = {
        "score_chosen": chosen.mean(),
        "score_rejected": rejected.mean(),
        "score_square": np.square([chosen, rejected]).mean(),
    }
    write_statistics(tmp_path, means)
    model = replace(find_pretrained("quickstart"), directory=tmp_path)
    both = np.concatenate([chosen, rejected])
    np.testing.assert_allclose(read_statistics(model), (both.mean(), both.std()), rtol=1e-6)
    before = read_statistics(model)
    write = Path.write_text

    def half(self: Path, text: str, **kwargs: str) -> int:
        write(self, text[:5])
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="score_statistics.json could not be written"):
        write_statistics(tmp_path, {name: 2 * value for name, value in means.items()})
    assert read_statistics(model) == before
