"""JAX without the GPUs of its host would train on the CPU, for hours: it is told in words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import rlhf_jax
from meshes import multihost
from meshes.multihost import start_devices
from rlhf_jax import chat, evaluate, train

FOUND = r"this host has NVIDIA GPUs \(nvidia0, nvidia12; visible: all\), but JAX found only the CPU"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The device files of a host with two GPUs. This process has the CPU, which nobody chose."""
    for name in ("null", "nvidia-uvm", "nvidia0", "nvidia12", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(multihost, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    jax.config.update("jax_platforms", None)
    yield tmp_path
    jax.config.update("jax_platforms", "cpu")


@pytest.mark.usefixtures("host")
def test_it_is_told_what_is_there_and_what_to_do() -> None:
    with pytest.raises(ValueError, match=FOUND) as told:
        start_devices("1x1")
    for part in ("(jaxlib 0.", "'rlhf-jax[cuda13]'", "'rlhf-jax[cuda12]'", "JAX_PLATFORMS=cpu"):
        assert part in str(told.value)
    with pytest.raises(ValueError, match=FOUND):
        rlhf_jax.load("quickstart")


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (train.main, ["--output-dir={host}/run"]),
        (chat.main, ["quickstart"]),
        (evaluate.main, ["perplexity", "quickstart", "{host}/text.txt"]),
    ],
    ids=["train", "chat", "evaluate"],
)
def test_commands_say_it_in_one_line(main, flags, host, monkeypatch, capsys) -> None:
    monkeypatch.delenv("RLHF_JAX_TRACEBACK", raising=False)
    (host / "text.txt").write_text("some text")
    assert main([flag.format(host=host) for flag in flags]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.match(f"error: {FOUND}", said[0])
    assert not (host / "run").exists()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    start_devices("1x1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ValueError, match="visible: 1"):
        start_devices("1x1")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("setting", "before"), [("jax_platforms", None), ("jax_platform_name", "")]
)
def test_a_cpu_that_was_chosen_is_used(setting: str, before: str | None) -> None:
    jax.config.update(setting, "cpu")
    try:
        start_devices("1x1")
    finally:
        jax.config.update(setting, before)


def test_a_host_without_gpus_uses_its_cpu(host: Path) -> None:
    for name in ("nvidia0", "nvidia12"):
        (host / name).unlink()
    start_devices("1x1")


def test_a_platform_that_cannot_start_is_an_error_of_the_user() -> None:
    program = "from meshes.multihost import start_devices; start_devices(None)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ValueError: JAX cannot start its devices" in done.stderr
    assert "none_such" in done.stderr
