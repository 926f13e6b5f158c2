"""One request, however often it is passed on; a save is finished; one signal more ends all."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from array import array

import pytest

from rlhf_jax.runtime.signals import HEARD_AFTER, SAME_REQUEST, Stopped, StopSignals, wait_for


class Clock:
    """Seconds that go by when a test says so."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def wait(self) -> None:
        self.seconds += SAME_REQUEST


def test_copies_of_the_first_signal_are_the_same_request(capsys) -> None:
    clock = Clock()
    with StopSignals(clock) as signals:
        assert signals.came is None
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
        assert signals.came == signal.SIGTERM
        said = "interrupted: saving after this step (SIGTERM again: stop at once)\n"
        assert capsys.readouterr().out == said
        clock.wait()
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGINT)
    assert (stopped.value.code, stopped.value.at_once) == (130, True)


@pytest.mark.parametrize("asked_here", [True, False])
def test_a_save_is_ended_by_the_second_signal_that_comes_meanwhile(asked_here, capsys) -> None:
    """Also where another process was asked to save."""
    clock = Clock()
    with StopSignals(clock) as signals:
        if asked_here:
            signal.raise_signal(signal.SIGTERM)
        signals.saving = True
        clock.wait()
        capsys.readouterr()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert capsys.readouterr().out == "saving, a moment (SIGTERM again: stop at once)\n"
        clock.wait()
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGTERM)
    assert (stopped.value.code, stopped.value.at_once) == (143, True)


def test_afterwards_signals_do_what_they_did() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals():
        pass
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_another_thread_gets_is_heard_while_waiting() -> None:
    """Nothing interrupts the main thread then: a plain `join` would hear of it afterwards."""
    heard = threading.Event()

    def finish() -> None:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(3 * HEARD_AFTER)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert heard.wait(30), "the handler has not run"

    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        wait_for(finish)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_amid_a_write_that_nobody_reads_is_noted_and_said_elsewhere() -> None:
    """As with `| less`, or a terminal that ctrl-S holds: the pipe is full when ctrl-C comes."""
    program = """
import sys
from rlhf_jax.runtime.log import say
from rlhf_jax.runtime.signals import StopSignals

with StopSignals() as signals:
    while signals.came is None:
        say("x" * 200)
print("saved", file=sys.stderr)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    ) as process:
        assert process.stdout is not None
        while process.poll() is None and not is_full(process.stdout.fileno()):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.endswith("saved\n")
    assert "interrupted: saving after this step" in out + errors  # out: it came between two writes


def is_full(pipe: int) -> bool:
    """Whether less than a page of it is free: who writes a page waits."""
    (waiting,) = array("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
    return waiting > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 4096


def test_waiting_ends_with_the_error_of_what_it_waited_for() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        wait_for(fail)
