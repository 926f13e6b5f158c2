"""Checks that the configs of the stages share."""

import dataclasses
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool | np.bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}
"""What a field of a type may hold, and that in words."""


def check_at_least(owner: object, minimum: float, *names: str) -> None:
    """ValueError naming the first of these fields below `minimum` or no number (None passes)."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if value is not None and not float(value) >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_kinds(owner: Any) -> None:
    """ValueError naming the first field of a dataclass that wants one of some names, a number or a
    flag, and has none. What the command line read has its type, what is written in Python has not.
    """
    hints = get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        hint, value = hints[field.name], getattr(owner, field.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and NoneType in kinds:
            continue
        if get_origin(kinds[0]) is Literal and value not in get_args(kinds[0]):
            allowed = ", ".join(map(repr, get_args(kinds[0])))
            raise ValueError(f"{field.name}={value!r} is not known: use one of {allowed}")
        wanted, what = KINDS.get(kinds[0], (object, ""))
        if not isinstance(value, wanted):
            raise ValueError(f"{field.name} must be {what}, got {value!r}")


def check_parts(name: str, rows: int, parts: int) -> None:
    """ValueError unless `gradient_accumulation_steps` divides a batch; names what would."""
    if rows % parts:
        allowed = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"gradient_accumulation_steps={parts} does not divide {name}={rows}: "
            f"use one of {allowed}"
        )
