"""One run at a time in a directory."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_jax.runtime.lock import LOCK_FILE, locked

HOLD = """
import pathlib, sys, time
from rlhf_jax.runtime.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        who = rf"a run is writing {tmp_path} \(process {process.pid} on host [^)]+\): wait for it"
        with pytest.raises(ValueError, match=who), locked(tmp_path):
            pytest.fail("two have it")
        process.kill()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with locked(tmp_path):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fail()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level("INFO"), locked(tmp_path):
        assert "a file system without locks: start one run at a time" in caplog.text


def test_a_child_that_outlives_the_run_does_not_keep_it(tmp_path: Path) -> None:
    """Such as the workers of a reward function."""
    program = HOLD.replace("import pathlib", "import os, pathlib").replace(
        "    print(", "    if os.fork():\n        time.sleep(600)\n    print("
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"  # says the child: it runs, and has let go
        process.kill()
        process.wait()
        try:
            with locked(tmp_path):
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
