"""Rows survive as JSON, with one transfer, and a resumed run's rows win."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.runtime.metrics import MetricsWriter, Sample, SampleTable, read_rows


def test_rows_hold_device_and_host_scalars(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    metrics = {"loss": jnp.float32(0.5), "kl": jnp.bfloat16(2), "n": 3, "x": np.float64(0.25)}
    returned = writer.write("ppo", 4, metrics)
    assert returned == {"loss": 0.5, "kl": 2.0, "n": 3.0, "x": 0.25}
    row = json.loads(writer.path.read_text())
    assert row.pop("time") > 1e9
    assert row == {"stage": "ppo", "step": 4, **returned}


def test_all_scalars_come_in_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, device_get = [], jax.device_get

    def counting(tree: object) -> object:
        calls.append(tree)
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", counting)
    metrics = {str(n): jnp.float32(n) for n in range(5)}
    MetricsWriter(tmp_path / "m.jsonl").write("sft", 0, metrics)
    assert len(calls) == 1


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    returned = writer.write("sft", 1, {"a": jnp.nan, "b": float("inf"), "c": 1.0})
    assert np.isnan(returned["a"])
    (row,) = read_rows(writer.path)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)
    assert row["nonfinite"] == ["a", "b"]


def test_a_metric_with_dims_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metric loss_B has shape \(2,\).*reduce it"):
        MetricsWriter(tmp_path / "m.jsonl").write("sft", 1, {"loss_B": jnp.ones(2)})


def test_a_resumed_run_repeats_steps_and_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for step in (1, 2, 3):
        MetricsWriter(path).write("sft", step, {"loss": step})
    with path.open("a") as file:
        file.write('{"stage": "sft", "st')  # killed in the middle of a row
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    for step in (2, 3):
        MetricsWriter(path).write("sft", step, {"loss": 10 * step})
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 1), (2, 20), (3, 30)]


def test_the_rows_that_a_stage_writes_again_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.drop("sft", after=-1)  # nothing was written
    for stage, step in (("sft", 0), ("sft", 2), ("reward", 0), ("reward", 1), ("reward", 1)):
        writer.write(stage, step, {"loss": jnp.nan if step else 0.1})
    before = writer.path.read_text().splitlines()
    writer.drop("reward", after=0)
    assert writer.path.read_text().splitlines() == before[:3]
    writer.drop("sft", after=-1)
    assert writer.path.read_text().splitlines() == before[2:3]


def test_samples_carry_their_step_and_every_letter(tmp_path: Path) -> None:
    table = SampleTable(tmp_path / "samples" / "ppo.jsonl")
    table.write(50, [Sample("é", "b\n", 1.5, "so", float("nan")), Sample("p", "a")])
    rows = [json.loads(line) for line in table.path.read_text(encoding="utf-8").split("\n")[:-1]]
    first = {"prompt": "é", "answer": "b\n", "score": 1.5, "answer_before": "so"}
    assert rows[0] == {"step": 50, **first, "score_before": None}
    assert rows[1]["answer_before"] is None


def test_a_letter_that_a_killed_run_cut_in_two_ends_no_report(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = '{"stage": "ppo", "step": 1, "rewards/kürze/mean": 1.0}\n'.encode()
    path.write_bytes(whole + whole[: whole.index("ü".encode()) + 1])
    assert [row["step"] for row in read_rows(path)] == [1]
    path.write_bytes(whole[: whole.index("ü".encode()) + 1] + b"\n" + whole)
    with pytest.raises(ValueError, match=r"m\.jsonl, line 1 is no JSON"):
        read_rows(path)
