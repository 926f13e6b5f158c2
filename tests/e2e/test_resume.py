"""A run that was interrupted goes on as if it had not been: same losses, same answers."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_jax.stages.run import Run

type Interrupt = Callable[[str, int], AbstractContextManager[None]]


@pytest.fixture
def interrupted_in(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """`with interrupted_in("ppo", 1)`: ctrl-C while that step is being logged."""

    @contextmanager
    def press(stage: str, step: int) -> Iterator[None]:
        log = Run.log

        def log_and_press(self, this_stage, this_step, metrics):
            values = log(self, this_stage, this_step, metrics)
            if (this_stage, this_step) == (stage, step) and not self.interrupted:
                signal.raise_signal(signal.SIGINT)
            return values

        with monkeypatch.context() as patch:
            patch.setattr(Run, "log", log_and_press)
            yield

    return press


@pytest.mark.parametrize("meshes", [("4x2",) * 4, ("4x2", "2x1", "4x2", "2x1")], ids="-".join)
def test_an_interrupted_run_goes_on_to_the_same_losses(
    small, run, unbroken, interrupted_in, same_metrics, tmp_path, meshes
) -> None:
    """Interrupted once in every stage, and continued on the next of these meshes."""
    cfg = small(tmp_path / "run")
    for mesh, stage, step in zip(meshes, ("sft", "reward", "ppo"), (2, 3, 1), strict=False):
        cfg = replace(cfg, mesh=mesh)
        with interrupted_in(stage, step), pytest.raises(KeyboardInterrupt):
            run(cfg)
        assert (tmp_path / "run" / "checkpoints" / stage / str(step)).is_dir()
        cfg = replace(cfg, resume=True)
    resumed = run(replace(cfg, mesh=meshes[-1]))
    same_metrics(unbroken.metrics(), resumed.metrics(), rtol=1e-3, atol=1e-4)
    assert resumed.answers() == unbroken.answers()


def test_what_was_trained_but_not_exported_is_evaluated_and_exported(
    run, small, unbroken, tmp_path, capsys
) -> None:
    """Killed between PPO's last checkpoint and its export: nothing is trained twice."""
    directory = tmp_path / "run"
    shutil.copytree(unbroken.directory, directory)
    summary = json.loads((directory / "summary.json").read_text())
    wanted = summary.pop("ppo")
    (directory / "summary.json").write_text(json.dumps(summary))
    shutil.rmtree(directory / "actor")
    run(small(directory, {"mesh": "4x2", "resume": True}))
    printed = capsys.readouterr().out
    assert "sft: done already" in printed
    assert "reward: done already" in printed
    assert json.loads((directory / "summary.json").read_text())["ppo"] == wanted
    names = [
        directory / "actor" / "model.safetensors" for directory in (directory, unbroken.directory)
    ]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(tmp_path: Path) -> None:
    flags = [f"--output-dir={tmp_path / 'run'}", "--mesh=1x1", "--step", "1", "--log-interval=1"]
    flags += ["--sft.batch-size=8", "--sft.max-steps=1000000", "--data.max-rows=64"]
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf_jax.train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("sft  2/"):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted: saving after this step" in rest
    assert "go on with the same command and --resume" in rest
    assert list((tmp_path / "run" / "checkpoints" / "sft").iterdir())
