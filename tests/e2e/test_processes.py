"""Two processes of 4 devices make the same run as one process of 8."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.cli import to_yaml
from rlhf_jax.stages.config import TrainConfig

NUM_PROCESSES = 2
LIMIT = 500
"""Seconds."""

type Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(small, tmp_path: Path):
    """`start("--resume")`: a small run on 4x2 by two processes, which end with the test."""
    file = tmp_path / "run.yaml"
    plain = small(tmp_path / "run", {"mesh": "4x2"})
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str, config: TrainConfig = plain) -> list[subprocess.Popen[str]]:
        file.write_text(to_yaml(config), encoding="utf-8")
        job = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(NUM_PROCESSES),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "rlhf_jax.train", f"--config={file}", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **job, "JAX_PROCESS_ID": str(index)},
            )
            for index in range(NUM_PROCESSES)
        ]
        started.extend(processes)
        return processes

    yield run
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_silent(text: str) -> bool:
    """Nothing of ours: the library that connects CPU processes prints lines, and into lines."""
    return not any(word in text for word in ("sft", "ppo", "mesh", "seed", "error"))


def test_two_processes_make_the_run_of_one(
    start: Start, unbroken, outcome, same_metrics, tmp_path: Path
) -> None:
    """Interrupted on the second process, continued by two others: metrics, files, silence."""
    first, second = start()
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("sft  1/"):
            second.send_signal(signal.SIGTERM)
            break
    outputs = [process.communicate(timeout=LIMIT) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [143, 143], outputs
    assert "go on with the same command and --resume" in outputs[0][0]
    assert is_silent(outputs[1][0]), outputs[1][0]

    resumed = start("--resume")
    outputs = [process.communicate(timeout=LIMIT) for process in resumed]
    assert [process.returncode for process in resumed] == [0, 0], outputs
    assert "finished in" in outputs[0][0]
    assert "process 1 of 2 (counted from 0) waits for the others at 127.0.0.1" in outputs[1][0]
    assert is_silent(outputs[1][0]), outputs[1][0]
    made = outcome(tmp_path / "run")
    same_metrics(unbroken.metrics(), made.metrics(), rtol=1e-3, atol=1e-4)
    assert made.answers() == unbroken.answers()
    for name in ("sft", "reward", "actor", "critic"):
        assert (tmp_path / "run" / name / "model.safetensors").is_file()


def test_two_processes_share_what_step_3_keeps_beside_its_models(
    start: Start, with_extras, extras, outcome, same_metrics, tmp_path: Path
) -> None:
    """Adapters, average, coefficient, moments, text, and scores that one process makes.

    Key biases change no attention, so their gradient is rounding, which Adam makes steps of; the
    other weights end within a tenth of one step.
    """
    processes = start(config=with_extras(tmp_path / "run"))
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    made = outcome(tmp_path / "run")
    same_metrics(extras.metrics(), made.metrics(), rtol=1e-3, atol=1e-4)
    for name in ("actor", "actor_ema", "critic"):
        mine, theirs = (
            load_file(run.directory / name / "model.safetensors") for run in (made, extras)
        )
        for leaf in mine.keys() - {leaf for leaf in mine if leaf.endswith("k_proj.bias")}:
            np.testing.assert_allclose(mine[leaf], theirs[leaf], rtol=1e-3, atol=3e-5, err_msg=leaf)


@pytest.mark.slow
def test_two_processes_keep_models_and_optimizers_on_the_host(
    start: Start, small, unbroken, outcome, same_metrics, tmp_path: Path
) -> None:
    """Each process has its shards of them in its host memory: the numbers of the run without."""
    changes = {
        "mesh": "4x2",
        "step": (1, 3),
        "reward_model": str(unbroken.directory / "reward"),
        "sft.offload": True,
        "ppo.offload": True,
        "ppo.offload_reference_model": True,
        "ppo.offload_reward_model": True,
        "ppo.ema.enable": True,
        "ppo.ema.offload": True,
    }
    processes = start(config=small(tmp_path / "run", changes))
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    made = outcome(tmp_path / "run")
    rows = {key: row for key, row in unbroken.metrics().items() if key[0] in ("sft", "ppo")}
    same_metrics(rows, made.metrics(), rtol=1e-3, atol=1e-4)
    assert made.answers() == unbroken.answers()
    assert (tmp_path / "run" / "actor_ema" / "model.safetensors").is_file()


def test_of_two_processes_the_first_tells_what_is_wrong(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    processes = start()
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert "holds another run" in outputs[0][1]
    assert is_silent(outputs[1][1]), outputs[1][1]
