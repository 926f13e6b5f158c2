"""What a run says to a person: facts in one line, progress with live metrics.

On a terminal progress is a bar that stays in place; in a file or a pipe it is a plain line every
log interval. Metrics are passed as floats: fetch them from the device at log steps only.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

WIDE = 120
"""Columns of a terminal that have room for a bar beside the metrics."""


class _Console(Console):
    """Outlives its reader: a ctrl-C also ends the other side of `| tee log`, and the run saves."""

    def on_broken_pipe(self) -> None:
        """Goes on without printing, and says so where errors go."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        try:
            print("nobody reads the output any more: it goes on without", file=sys.stderr)
        except BrokenPipeError:  # 2>&1 |
            os.dup2(null, sys.stderr.fileno())


console = _Console(highlight=False, soft_wrap=True)
"""Where everything goes. It follows `sys.stdout`, so redirecting works."""


def silence() -> None:
    """Print nothing from here on: for every process of a job but the first."""
    console.quiet = True


def say(text: str) -> None:
    """One fact in one line, printed as it stands (brackets are no markup)."""
    console.print(Text(text))


class StepProgress:
    """Counts steps of one stage; made by `progress`."""

    def __init__(self, description: str, total: int, done: int, every: int):
        if every < 1:
            raise ValueError(f"every={every}: say after how many steps (1 or more) to print a line")
        self._description, self._total, self._every = description, total, every
        self._first, self._started = done, time.perf_counter()
        self._metrics = ""
        self._bar: tuple[Progress, TaskID] | None = None

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """`done` of the total steps are finished. Metrics stay on display until the next ones.

        In a file a line is written when `done` is a multiple of `every`, and at the end.
        """
        if metrics is not None:
            self._metrics = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=done, metrics=self._metrics)
        elif done % self._every == 0 or done == self._total:
            say(self._line(done))

    def _line(self, done: int) -> str:
        """`ppo  20/50  eta 0:31  reward 0.51  kl 0.02`"""
        seconds_a_step = (time.perf_counter() - self._started) / max(done - self._first, 1)
        eta = _clock(seconds_a_step * (self._total - done))
        line = f"{self._description}  {done}/{self._total}  eta {eta}  {self._metrics}"
        return line.rstrip()

    @contextmanager
    def _live(self) -> Iterator[None]:
        whole, rest = Column(no_wrap=True), Column(no_wrap=True, ratio=1, overflow="ellipsis")
        wide = console.width >= WIDE
        columns = [
            TextColumn("{task.description}", table_column=whole),
            *([BarColumn(bar_width=24)] if wide else []),
            MofNCompleteColumn(table_column=whole.copy()),
            *([TimeElapsedColumn(table_column=whole.copy())] if wide else []),
            TextColumn("eta", table_column=whole.copy()),
            TimeRemainingColumn(table_column=whole.copy()),
            TextColumn("{task.fields[metrics]}", markup=False, table_column=rest),
        ]
        with Progress(*columns, console=console, expand=True) as bar:
            task = bar.add_task(
                self._description, total=self._total, completed=self._first, metrics=""
            )
            self._bar = (bar, task)
            yield
            self._bar = None


@contextmanager
def progress(
    description: str, total: int, *, done: int = 0, every: int = 10
) -> Iterator[StepProgress]:
    """Show the progress of `total` steps, `done` of which an earlier run did.

        with log.progress("ppo", total=50, every=10) as shown:
            shown.update(1, {"reward": 0.5})

    What `say` prints stands above the bar meanwhile. Two of them cannot be open at once.
    """
    shown = StepProgress(description, total, done, every)
    if console.is_terminal and not console.quiet:
        with shown._live():
            yield shown
    else:
        yield shown


def _clock(seconds: float) -> str:
    """`0:31`, `12:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
