"""How fast an iteration was."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_jax.stages.throughput import throughput
from tests.models.cases import OPT


def test_rows_that_fill_a_batch_up_are_no_samples() -> None:
    cfg = SimpleNamespace(
        batch_size=4, generation_batches=2, ppo_epochs=1, max_answer_seq_len=4, remat="none"
    )
    timer = SimpleNamespace(peek=lambda: {"generate": 1.0, "update": 1.0}, elapsed=lambda: 2.0)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(ppo=cfg), timer=timer, mesh=SimpleNamespace(size=1)
    )
    data: Any = SimpleNamespace(max_prompt=4)
    batches: Any = [
        SimpleNamespace(valid_B=np.array(valid)) for valid in ([1, 1, 1, 1], [1, 0, 0, 0])
    ]
    metrics: Any = {"response_length/mean": 3.0}
    found = throughput(run, OPT, data, batches, metrics)
    assert found["perf/samples_per_second"] == pytest.approx(5 / 2)
    assert found["perf/generated_tokens_per_second"] == pytest.approx(5 * 3)
