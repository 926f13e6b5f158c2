"""What was given, as name and values, before anyone asks what the name means."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Given:
    """One flag or YAML key with its values.

    Attributes:
        name: with underscores and without dashes in front: `sft.learning_rate`.
        values: text; none for a bare switch.
        label: how errors call it: `--sft.learning-rate`, `run.yaml: sft.learning_rate`.
        file: the YAML file that it stands in; empty on the command line.
    """

    name: str
    values: tuple[str, ...]
    label: str
    file: str = ""

    @property
    def one_value(self) -> str:
        """ValueError unless there is exactly one value."""
        if len(self.values) != 1:
            got = f"{len(self.values)}: {' '.join(self.values)}" if self.values else "none"
            raise ValueError(f"{self.label} takes one value, got {got}")
        return self.values[0]


def split_argv(argv: Sequence[str]) -> list[Given]:
    """`--a=1 --b 2 3` as two `Given`s. Negative numbers are values.

    Raises:
        ValueError: a value without a flag in front, or one dash where two belong.
    """
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            label, equals, value = token.partition("=")
            found.append((label, [value] if equals else []))
        elif token.startswith("-") and not _NUMBER.match(token):
            raise ValueError(f"{token} is not a flag: flags start with two dashes (--help)")
        elif not found:
            raise ValueError(f"{token!r} stands in front of all flags: give --flag=value (--help)")
        else:
            found[-1][1].append(token)
    return [Given(_name(label), tuple(values), label) for label, values in found]


def _name(label: str) -> str:
    return label.removeprefix("--").replace("-", "_")
