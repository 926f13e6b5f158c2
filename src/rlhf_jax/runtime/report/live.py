"""The report of a run that goes on: refreshed with its rows, and written when it ends."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from rlhf_jax.runtime.log import say
from rlhf_jax.runtime.report.page import State, build_report
from rlhf_jax.runtime.report.settings import Baseline

MIN_SECONDS = 10.0
MAX_SHARE = 0.01
"""Of the time of a run may go into refreshing its report."""


class LiveReport:
    """Keeps `report.html` up to date; of several processes the first writes it.

    As a context: however the run ends, its report says so.
    """

    def __init__(
        self,
        directory: Path,
        baseline: Baseline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._baseline, self._clock = directory, baseline, clock
        self._next = -float("inf")
        self._said: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.write(State("finished"))
        elif issubclass(kind, KeyboardInterrupt):
            self.write(State("interrupted"))
        else:
            self.write(State("failed", f"{kind.__name__}: {error}"))

    def refresh(self) -> None:
        """Call it after a row: writes where the last time is long enough ago."""
        if self._clock() >= self._next:
            self.write(State("running"))

    def write(self, state: State) -> None:
        """Writes the report now."""
        if jax.process_index() != 0:
            return
        began = self._clock()
        try:
            build_report(self._directory, state=state, baseline=self._baseline)
        except Exception as error:
            # It reads what has been written and changes nothing: hours of training must not end
            # with a disk that is full or a mistake in the report.
            message = (
                f"report.html could not be written, the run goes on: {type(error).__name__}: "
                f"{error}"
            )
            if message != self._said:
                say(message)
            self._said = message
        now = self._clock()
        self._next = now + max(MIN_SECONDS, (now - began) / MAX_SHARE)
