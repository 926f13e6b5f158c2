"""A run that was interrupted goes on as if it had not been: same losses, same answers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_jax.stages.run import Run
from tests.runtime.test_trackers import scalars

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


def test_an_interrupted_run_goes_on_to_the_same_losses(
    small, run, unbroken, interrupted_in, same_metrics, tmp_path
) -> None:
    """Interrupted once in every stage, and continued on the next of these meshes: steps 1 and 3 on
    another, step 2 on the same one.
    """
    meshes = ("4x2", "2x1", "2x1", "4x2")
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


def test_no_other_run_starts_where_one_writes(small, run, tmp_path, monkeypatch) -> None:
    cfg = small(tmp_path / "run", {"mesh": "1x1", "step": (1,), "sft.max_steps": 1})
    log, refused = Run.log, []

    def log_and_start(self, stage, step, metrics):
        for flag in ("resume", "overwrite_output_dir"):
            with pytest.raises(ValueError, match="a run is writing"):
                run(replace(cfg, **{flag: True}))
            refused.append((step, flag))
        return log(self, stage, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_start)
        assert {step for _, step in run(cfg).metrics()} == {0, 1}
    assert len(refused) == 4
    run(replace(cfg, overwrite_output_dir=True))


def test_a_weighted_blend_goes_on_where_it_stopped_and_a_tracker_gets_each_step_once(
    small, run, interrupted_in, same_metrics, tmp_path
) -> None:
    """On another mesh, in the second epoch: 20 rows are 3 batches."""
    sources = tmp_path / "sums.jsonl", tmp_path / "words.jsonl"
    for source, answers in zip(sources, ("12345678", ["a long answer"] * 8), strict=True):
        rows = [{"prompt": f"{n} ", "completion": answer} for n, answer in enumerate(answers * 3)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "mesh": "4x2", "step": (1,), "sft.max_steps": 6, "report_to": ("tensorboard",),
        "data.data_path": tuple(map(str, sources)), "data.data_weights": (3.0, 1.0),
        "data.data_split": "", "data.max_rows": 20,
    }  # fmt: skip
    unbroken = run(small(tmp_path / "unbroken", changes))
    cfg = small(tmp_path / "run", changes)
    with interrupted_in("sft", 4), pytest.raises(KeyboardInterrupt):
        run(cfg)
    resumed = run(replace(cfg, mesh="2x1", resume=True))
    same_metrics(unbroken.metrics(), resumed.metrics(), rtol=1e-3, atol=1e-4)
    losses = [row["loss"] for row in unbroken.metrics().values() if "loss" in row]
    assert np.ptp(losses) > 0.1
    sent = scalars(tmp_path / "run" / "tensorboard")
    assert {key: len(values) for key, values in sent.items() if len(values) != 1} == {}
    assert {step for name, step in sent if name == "sft/loss"} == {1, 2, 3, 4, 5, 6}


def test_what_memory_decides_is_no_other_setting(small, run, interrupted_in, tmp_path) -> None:
    """`auto` is what was asked for, whatever it became."""
    changes = {"mesh": "1x1", "step": (1,), "sft.remat": "auto", "sft.max_steps": 2}
    cfg = small(tmp_path / "run", changes)
    with interrupted_in("sft", 1), pytest.raises(KeyboardInterrupt):
        run(cfg)
    resumed = run(replace(cfg, resume=True))
    assert {step for _, step in resumed.metrics()} == {0, 1, 2}
    assert "remat: auto" in (resumed.directory / "config.yaml").read_text()


def test_packed_batches_stay_what_they_were_or_the_run_ends(
    small, run, interrupted_in, same_metrics, tmp_path
) -> None:
    """In the second epoch. Fourteen sequences hold the 64 rows, and 8 devices share 16."""
    changes = {"mesh": "1x1", "step": (1,), "sft.packing": True, "sft.batch_size": 64}
    unbroken = run(small(tmp_path / "unbroken", changes))
    cfg = small(tmp_path / "run", changes)
    with interrupted_in("sft", 2), pytest.raises(KeyboardInterrupt):
        run(cfg)
    with pytest.raises(ValueError, match="of sft had 14 packed sequences and has 16 on"):
        run(replace(cfg, mesh="8x1", resume=True))
    resumed = run(replace(cfg, resume=True))
    same_metrics(unbroken.metrics(), resumed.metrics(), rtol=1e-6)


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


FLAGS = [
    "--mesh=1x1",
    "--step",
    "1",
    "--log-interval=1",
    "--sft.batch-size=8",
    "--data.max-rows=64",
]


@contextmanager
def training(directory: Path, *flags: str, program: str = "") -> Iterator[subprocess.Popen[str]]:
    """Step 1 in `directory` as a process of its own, by the command or by this Python program."""
    how = ["-c", program] if program else ["-m", "rlhf_jax.train"]
    with subprocess.Popen(
        [sys.executable, *how, f"--output-dir={directory}", *FLAGS, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], beginning: str) -> str:
    """What is printed up to the line with this beginning."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if line.startswith(beginning):
            return lines
    assert process.stderr is not None
    raise AssertionError(f"no line begins with {beginning!r}: {lines}{process.stderr.read()}")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_and_its_copy_save_and_say_how_to_go_on(tmp_path: Path, signum, code) -> None:
    with training(tmp_path / "run", "--sft.max-steps=1000000") as process:
        read_until(process, "sft  2/")
        process.send_signal(signum)
        read_until(process, "interrupted: saving after this step")
        process.send_signal(signum)
        rest = read_until(process, "stopped sft after step")
        _, errors = process.communicate()
    assert process.returncode == code, errors
    assert rest.endswith("go on with the same command and --resume\n")
    assert errors.endswith("interrupted\n")
    (step,) = saved_steps(tmp_path / "run")
    assert step >= 2
    assert state(tmp_path / "run") == "interrupted"


def saved_steps(directory: Path) -> list[int]:
    """Those of the complete checkpoints."""
    names = [path.name for path in (directory / "checkpoints" / "sft").iterdir()]
    return [int(name) for name in names if name.isdigit()]


def state(directory: Path) -> str:
    """What the report calls the run."""
    (found,) = re.findall(r'class="state (\w+)"', (directory / "report.html").read_text())
    return found


SLOW_TO_SAVE = """
import os, sys, time
from rlhf_jax import train
from rlhf_jax.runtime import signals

rename, signals.SAME_REQUEST = os.rename, 0.0

def slow_rename(before, after, **kwargs):
    if os.path.basename(after).isdigit():  # the checkpoint gets its name: it is complete
        print("renaming", flush=True)
        while not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.05)
    rename(before, after, **kwargs)

os.rename = slow_rename
sys.exit(train.main())
"""


def test_a_save_is_finished_after_a_second_signal(tmp_path: Path, monkeypatch) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("GO_ON", str(go_on))
    flags = "--sft.max-steps=1000000"
    with training(tmp_path / "run", flags, program=SLOW_TO_SAVE) as process:
        read_until(process, "sft  2/")
        process.send_signal(signal.SIGINT)
        read_until(process, "renaming")
        process.send_signal(signal.SIGINT)
        read_until(process, "saving, a moment")
        go_on.touch()
        rest = read_until(process, "stopped sft after step")
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert rest.endswith("go on with the same command and --resume\n")
    assert len(saved_steps(tmp_path / "run")) == 1
    assert state(tmp_path / "run") == "interrupted"


def test_a_third_signal_ends_a_save_and_the_stage_starts_anew(tmp_path: Path, monkeypatch) -> None:
    """No abort, a report that tells, and no row twice."""
    monkeypatch.setenv("GO_ON", str(tmp_path / "never"))
    flags = "--sft.max-steps=200"
    with training(tmp_path / "run", flags, program=SLOW_TO_SAVE) as process:
        read_until(process, "sft  2/")
        process.send_signal(signal.SIGINT)
        read_until(process, "renaming")
        process.send_signal(signal.SIGINT)
        read_until(process, "saving, a moment")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.endswith("interrupted\n")
    assert state(tmp_path / "run") == "interrupted"
    assert saved_steps(tmp_path / "run") == []
    with training(tmp_path / "run", flags, "--resume") as process:
        printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "sft: no checkpoint, starts anew" in printed
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == list(range(201))
