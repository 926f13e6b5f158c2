"""Ctrl-C and SIGTERM: the first saves and stops a run, another one stops it at once."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self

from rlhf_jax.runtime.log import say

NAMES = {signal.SIGINT: "ctrl-C", signal.SIGTERM: "SIGTERM"}
SAME_REQUEST = 2.0
"""Seconds in which signals are one: `uv run` and `timeout` send again what has come already."""
HEARD_AFTER = 0.2
"""Seconds that a signal can go unheard in `wait_for`."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the run: with a checkpoint, or `at_once`, whatever was in progress."""

    def __init__(self, signum: int, *, at_once: bool = False) -> None:
        super().__init__()
        self.code, self.at_once = 128 + signum, at_once


class StopSignals:
    """Notes signals while it is entered.

    Attributes:
        came: the first signal; None: there was none.
        saving: the checkpoint that it asked for is being written. Another signal does not end that,
            only one more does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.came: int | None = None
        self.saving = False
        self._told = False
        self._last = -float("inf")

    def __enter__(self) -> Self:
        self._before = {signum: signal.signal(signum, self._note) for signum in NAMES}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: object) -> None:
        del frame
        now = self._clock()
        if now - self._last < SAME_REQUEST:
            return
        self._last = now
        if self.saving and not self._told:
            self._told, text = True, "saving, a moment"
        elif self.came is None and not self.saving:
            text = "interrupted: saving after this step"
        else:
            raise Stopped(signum, at_once=True)
        self.came = self.came or signum
        text += f" ({NAMES[signal.Signals(signum)]} again: stop at once)"
        try:
            say(text)
        except RuntimeError:  # it came while stdout waits for its reader, amid a write
            print(text, file=sys.stderr)


def wait_for(finish: Callable[[], None]) -> None:
    """Calls `finish`, which blocks, in another thread: signals are heard until it returns.

    Python handles a signal between two steps of the main thread. One that comes just as that thread
    begins to wait for a lock would be handled only when it has the lock.
    """
    done: Future[None] = Future()

    def call() -> None:
        try:
            done.set_result(finish())
        except BaseException as error:  # raised below
            done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    while not done.done():
        wait([done], timeout=HEARD_AFTER)
    done.result()
