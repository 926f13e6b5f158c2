"""Two processes: what the first one makes reaches both, and its errors end both."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshes import multihost
from meshes.layout import parse_mesh
from meshes.multihost import from_first_process

PROGRAM = """
import sys
import jax
import numpy as np
from meshes.multihost import from_first_process, start_processes

start_processes()
index = jax.process_index()

def make():
    assert index == 0, "only the first process makes it"
    if "fail" in sys.argv:
        raise ValueError("this is wrong")
    return np.array([[0.5, np.nan, -3.0]])

try:
    print(from_first_process(make, (1, 3)).tolist())
except ValueError as error:
    print("told:", error)
"""


def started(program: str, *args: str) -> list[subprocess.Popen[str]]:
    """Two processes of one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *args],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **job, "JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]


def run_two(*args: str) -> list[tuple[int, str]]:
    """Exit code and last line of each process."""
    processes = started(PROGRAM, *args)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    lines = [
        [line for line in text.splitlines() if line.startswith(("[[", "told"))] for text in outputs
    ]
    return [(p.returncode, "".join(line[-1:])) for p, line in zip(processes, lines, strict=True)]


def test_what_the_first_process_makes_is_on_both() -> None:
    assert run_two() == [(0, "[[0.5, nan, -3.0]]")] * 2


def test_an_error_of_the_first_process_ends_both() -> None:
    assert run_two("fail") == [(0, "told: this is wrong"), (1, "")]


def test_a_mesh_that_leaves_a_process_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(process_index=number // 4) for number in range(8)]
    monkeypatch.setattr(multihost.jax, "devices", lambda: devices)
    monkeypatch.setattr(multihost.jax, "process_count", lambda: 2)
    multihost.check_processes_share(parse_mesh("5x1"))
    said = r"--mesh=4x1 asks for 4 of the 8 devices of 2 processes, and 1 .*: use --mesh=8x1"
    with pytest.raises(ValueError, match=said):
        multihost.check_processes_share(parse_mesh("4x1"))


FAILING = """
import pathlib, sys, time, jax
from meshes import multihost
multihost.FAREWELL = 1.0
multihost.start_processes()
print("started", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(.05)
with multihost.ending_alone():
    raise ValueError("only here")
"""


def test_a_process_that_fails_alone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """JAX would have it wait five minutes: the other one is stopped, as in a collective."""
    first, second = started(FAILING, str(tmp_path / "fail"))
    try:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        first.send_signal(signal.SIGSTOP)
        (tmp_path / "fail").touch()
        assert second.wait(timeout=60) == 1
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_one_process_makes_it_itself() -> None:
    made = from_first_process(lambda: np.array([1.0, 2.0]), (2,))
    assert made.dtype == np.float32
    assert made.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="wrong"):
        from_first_process(fail, (2,))


def fail() -> np.ndarray:
    raise ValueError("wrong")
