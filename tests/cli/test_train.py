"""The entry point: exit codes, errors in one line, and a frozen list of flags."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

from rlhf_jax.cli import parse, to_yaml
from rlhf_jax.cli.listing import flag_lines
from rlhf_jax.recipes.nearest import nearest_recipe
from rlhf_jax.runtime.report.settings import Baseline
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.train import main

type RunPipeline = Callable[[TrainConfig, str, Baseline], None]

FLAGS = Path(__file__).parent / "flags.txt"


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunPipeline], None]:
    """`pipeline(run)`: what `main` calls in place of the stages."""

    def use(run: RunPipeline) -> None:
        module = types.ModuleType("rlhf_jax.stages.pipeline")
        module.__dict__["run_pipeline"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)

    monkeypatch.delenv("RLHF_JAX_TRACEBACK", raising=False)
    return use


def raising(error: BaseException) -> RunPipeline:
    def run(config: TrainConfig, config_yaml: str, baseline: Baseline) -> None:
        raise error

    return run


def test_runs_the_stages_with_the_config(pipeline) -> None:
    seen: list[tuple[TrainConfig, str, Baseline]] = []
    pipeline(lambda *given: seen.append(given))
    assert main(["--step", "2", "--seed", "7"]) == 0
    config = parse(["--step", "2", "--seed", "7"])
    assert seen == [(config, to_yaml(config), nearest_recipe(asdict(config)))]


def test_wrong_flags_are_one_line_and_code_2(pipeline, capsys) -> None:
    pipeline(raising(AssertionError("must not run")))
    assert main(["--sft.batch-size=0"]) == 2
    assert capsys.readouterr().err == "error: sft: batch_size must be at least 1, got 0\n"


def test_errors_of_the_run_are_messages_and_code_1(pipeline, capsys, monkeypatch) -> None:
    for error in (ValueError("what"), FileNotFoundError("what"), OSError("what")):
        pipeline(raising(error))
        assert main([]) == 1
        assert capsys.readouterr().err.startswith("error: what\n")
    monkeypatch.setenv("RLHF_JAX_TRACEBACK", "1")
    with pytest.raises(OSError, match="what"):
        main([])


def test_bugs_keep_their_traceback_and_interrupts_exit_130(pipeline) -> None:
    pipeline(raising(KeyError("bug")))
    with pytest.raises(KeyError):
        main([])
    pipeline(raising(KeyboardInterrupt()))
    assert main([]) == 130


def test_out_of_memory_is_a_message(pipeline, capsys, monkeypatch) -> None:
    for text in ("RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: Out of memory allocating 9 bytes"):
        pipeline(raising(JaxRuntimeError(f"{text}.\nmore")))
        assert main([]) == 1
        err = capsys.readouterr().err
        assert err.startswith("error: a device is out of memory: smaller batches")
        assert f"JAX says: {text}.\n(" in err
    pipeline(raising(JaxRuntimeError("INTERNAL: another")))
    with pytest.raises(JaxRuntimeError):
        main([])
    pipeline(raising(JaxRuntimeError("RESOURCE_EXHAUSTED")))
    monkeypatch.setenv("RLHF_JAX_TRACEBACK", "1")
    with pytest.raises(JaxRuntimeError):
        main([])


def test_help_shows_the_recipes_defaults_and_needs_no_device() -> None:
    """`JAX_PLATFORMS` names no platform: whatever asked for a device would fail."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_jax.train", "--recipe=opt", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "none_such", "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.replace("│", " ").split())
    for expected in ("--ppo.kl-coef", "default: facebook/opt-1.3b", "quickstart,opt", "--config="):
        assert expected in text


def test_the_command_line_is_frozen() -> None:
    """A flag that comes, goes or changes is a change of the interface: look at the diff.

    python -m rlhf_jax.cli.listing > tests/cli/flags.txt
    """
    assert flag_lines() == FLAGS.read_text().splitlines()
