"""ctrl-C that stops an answer and not the program."""

import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Self


class Interrupts:
    """While it is entered, the first ctrl-C is noted and the second raises KeyboardInterrupt.

    Programs on the devices cannot be stopped: what runs between two of them looks at `came`.

    Attributes:
        came: whether ctrl-C came since it was entered last.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        """Where it is not `enabled`, ctrl-C raises KeyboardInterrupt as ever."""
        self.enabled, self.came = enabled, False

    def __enter__(self) -> Self:
        self.came = False
        if self.enabled:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            signal.signal(signal.SIGINT, self._before)

    def until_one_comes[Item](self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, until ctrl-C."""
        for item in items:
            yield item
            if self.came:
                return

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
