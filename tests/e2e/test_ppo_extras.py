"""What PPO can do beside its plain loop, all at once: it is logged, exported, and resumed."""

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.data import loader
from rlhf_jax.stages.run import Run

ON = ("objective/kl_coef", "objective/running_score_std", "loss/ptx_avg", "rewards/length/mean")


def test_every_iteration_logs_what_is_on(extras) -> None:
    rows = extras.metrics()
    for step in (1, 2, 3):
        assert all(np.isfinite(rows["ppo", step][name]) for name in ON)
        assert rows["ppo", step]["val/skipped"] == 0
        assert "rollout/logprob_diff_mean" not in rows["ppo", step]  # adapters drop out
    coefficients = [rows["ppo", step]["objective/kl_coef"] for step in (1, 2, 3)]
    # The first rollout is the reference's own: its KL is 0, below the target.
    assert coefficients[0] == pytest.approx(0.1)
    assert coefficients[1] == pytest.approx(0.1 * (1 - 0.2 * 8 / 16))
    assert rows["ppo", 3]["loss/ptx_avg"] < rows["ppo", 1]["loss/ptx_avg"]


def test_the_first_iteration_compiles_every_program(extras, compiled) -> None:
    """Neither what adapts nor what is carried on changes its type: nothing is compiled again."""
    assert extras.metrics()
    assert compiled[1].count("jit(update)") == 1
    assert (compiled[2], compiled[3]) == ([], [])


def test_the_average_is_evaluated_beside_the_last_weights_and_exported(extras) -> None:
    rows = extras.metrics()
    assert not [name for name in rows["ppo", 0] if "ema" in name]
    for step in (1, 2, 3):
        row = rows["ppo", step]
        mine = [name for name in row if name.startswith("eval/ema_")]
        assert {name.replace("ema_", "") for name in mine} == {
            name for name in row if name.startswith("eval/") and name not in mine
        }
    actor, average = (
        load_file(extras.directory / name / "model.safetensors") for name in ("actor", "actor_ema")
    )
    assert actor.keys() == average.keys()
    assert any(not np.array_equal(actor[name], average[name]) for name in actor)


def test_an_interrupted_run_has_the_same_coefficient_moments_text_and_average(
    run, with_extras, extras, same_metrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Each of its starts says that sampling is off-policy. Other rows are refused."""
    log, plain = Run.log, loader.fingerprint

    def log_and_press(self, stage, step, metrics):
        values = log(self, stage, step, metrics)
        if step == 1 and not self.interrupted:
            signal.raise_signal(signal.SIGINT)
        return values

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_press)
        with pytest.raises(KeyboardInterrupt):
            run(with_extras(tmp_path / "run"))
    for at, what in enumerate(("data", "pretraining text")):
        with monkeypatch.context() as patch:
            marks = iter(["!" * (n == at) for n in range(2)])
            patch.setattr(
                loader, "fingerprint", lambda rows, marks=marks: plain(rows) + next(marks)
            )
            with pytest.raises(ValueError, match=f"ppo was trained on other {what}: "):
                run(with_extras(tmp_path / "run", resume=True))
    resumed = run(with_extras(tmp_path / "run", resume=True))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("answers are drawn with min_p=0.01, repetition_penalty=1.3, their") == 4
    same_metrics(extras.metrics(), resumed.metrics(), rtol=1e-3, atol=1e-4)
    for name in ("actor", "actor_ema"):
        mine, theirs = (
            load_file(outcome.directory / name / "model.safetensors")
            for outcome in (resumed, extras)
        )
        for leaf, values in mine.items():
            np.testing.assert_allclose(values, theirs[leaf], rtol=1e-4, atol=1e-5)


def test_a_schedule_runs_over_the_steps_that_are_taken(
    run, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven prompts in batches of 8: of minibatches of two an epoch has four, and two where five
    rows are filler.
    """
    asked = {
        "step": (3,), "mesh": "1x1", "data.max_rows": 11, "ppo.max_steps": None,
        "ppo.num_train_epochs": 2, "ppo.minibatch_size": 2, "ppo.ppo_epochs": 3,
        "ppo.generation_batches": 2, "ppo.standardize_score": False,
    }  # fmt: skip

    def planned(run, actor, plan, num_updates):
        raise InterruptedError(f"{num_updates} steps")

    monkeypatch.setattr("rlhf_jax.stages.ppo.load_roles", planned)
    with pytest.raises(InterruptedError, match=f"^{2 * 3 * (4 + 2)} steps"):
        run(small(tmp_path / "run", asked))
