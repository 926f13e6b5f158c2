"""One process for each GPU: what each is told, and how all of them end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import train_processes
from scripts.train_processes import Job, wait


def test_each_process_sees_one_gpu_and_the_same_coordinator() -> None:
    job = Job(2, ["3", "5"], None)
    made = [job.environment(index, "127.0.0.1:77") for index in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == ["3", "5"]
    assert [each["JAX_PROCESS_ID"] for each in made] == ["0", "1"]
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"):
        assert {each[name] for each in made} == {"127.0.0.1:77"}
    assert {each["JAX_NUM_PROCESSES"] for each in made} == {"2"}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch):
    """`parsed("2,3", "--processes=1")`: the job on a host with these GPUs visible."""

    def parse(visible: str, *flags: str) -> tuple[Job, list[str]]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(sys, "argv", ["train_processes.py", *flags, "--", "--seed=1"])
        return train_processes.arguments()

    return parse


def test_the_visible_gpus_are_used(parsed) -> None:
    assert parsed("2, 3") == (Job(2, ["2", "3"], None), ["--seed=1"])
    assert parsed("2,3", "--processes=1")[0] == Job(1, ["2"], None)
    assert parsed("2,3", "--gpus", "3")[0] == Job(1, ["3"], None)
    assert parsed("0,1,2,3", "--gpus", "0,1", "2,3")[0] == Job(2, ["0,1", "2,3"], None)
    assert parsed("0", "--gpus", "GPU-1f", "GPU-2e")[0] == Job(2, ["GPU-1f", "GPU-2e"], None)
    assert parsed("-1", "--simulate=4")[0] == Job(2, None, 4)


@pytest.mark.parametrize(
    ("visible", "flags", "message"),
    [
        ("0,1", ["--processes=4"], "4 processes need as many GPUs, 2 are visible"),
        ("2,3", ["--gpus", "2", "7"], "no GPU 7: visible are 2, 3"),
        ("-1", [], "no GPU is visible: use --simulate"),
    ],
)
def test_gpus_that_are_not_there_are_refused(parsed, visible, flags, message) -> None:
    with pytest.raises(SystemExit, match=message):
        parsed(visible, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes=0"], "--processes=0: at least 1"),
        (["--simulate=0"], "--simulate=0: at least 1"),
        (["--simulate=2", "--gpus", "0"], "not allowed with"),
    ],
)
def test_numbers_that_make_no_job_are_refused(
    parsed, flags, message, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("0", *flags)
    assert message in capsys.readouterr().err


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def test_a_killed_process_ends_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that does not listen; the code is that of a killed process."""
    monkeypatch.setattr(train_processes, "GRACE", 0.5)
    first, second = python(STUBBORN), python("import time; time.sleep(600)")
    time.sleep(0.5)
    second.kill()
    began = time.monotonic()
    assert wait([first, second]) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 30
    assert first.wait(timeout=30) is not None
    assert "process 1 was killed (SIGKILL)" in capsys.readouterr().err


def test_a_failed_process_gives_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    both = [python("raise SystemExit(3)") for _ in range(2)]
    for process in both:  # of those that have ended the first one is named
        process.wait()
    assert wait(both) == 3
    assert "process 0 ended with exit code 3" in capsys.readouterr().err


def test_what_fails_without_a_killed_process_is_not_the_cause() -> None:
    """Both have ended when they are looked at."""
    first, second = python("raise SystemExit(1)"), python("import time; time.sleep(600)")
    first.wait()
    second.kill()
    second.wait()
    assert wait([first, second]) == 128 + signal.SIGKILL


@pytest.mark.parametrize("code", [130, 143])
def test_being_stopped_is_no_error(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert wait([python(f"raise SystemExit({code})") for _ in range(2)]) == code
    assert capsys.readouterr().err == ""


def test_processes_that_end_well_are_waited_for() -> None:
    assert wait([python("pass"), python("import time; time.sleep(0.3)")]) == 0


STUB = """
import os, pathlib, signal, sys, time

def stop(signum, frame):
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: os._exit(1))  # it came twice
    time.sleep(0.5)
    sys.exit(128 + signum)

for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, stop)
me = pathlib.Path(__file__).with_name(os.environ["JAX_PROCESS_ID"])
me.write_text(f"{os.getpid()} {sys.argv[1:]}")
time.sleep(600)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The command at work, with a program of that name that only waits; and its processes. All of
    them have the other end of its stdout.
    """
    package = tmp_path / "rlhf_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(STUB)
    script = Path(train_processes.__file__)
    command = [sys.executable, str(script), "--processes=2", "--simulate=1", "--", "--seed=7"]
    # Under nohup it is ignored, and would be by the command too.
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    parent = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE
    )
    signal.signal(signal.SIGHUP, before)
    files = [package / name for name in ("0", "1")]
    deadline = time.monotonic() + 60
    with parent:
        try:
            while not all(file.exists() and file.read_text() for file in files):
                assert time.monotonic() < deadline, "the processes have not started"
                time.sleep(0.05)
            assert all("['--seed=7']" in file.read_text() for file in files)
            yield parent, [int(file.read_text().split()[0]) for file in files]
        finally:
            parent.kill()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_reach_every_process(job, signum: int, code: int) -> None:
    """Ctrl-C and SIGTERM once, so that they can save; a closed terminal ends them."""
    parent, pids = job
    parent.send_signal(signum)
    assert parent.wait(timeout=60) == code
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of it")
def test_none_outlives_a_parent_that_is_killed(job) -> None:
    """Their stdout ends with the last of them."""
    parent, _ = job
    parent.kill()
    assert parent.communicate(timeout=60) == (b"", None)
