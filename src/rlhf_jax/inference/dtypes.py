"""What weights may be held in, by the names that people give. No JAX is imported here."""

from typing import Literal

LoadDtype = Literal["float32", "bfloat16", "fp32", "bf16"]
SHORT = {"fp32": "float32", "bf16": "bfloat16"}


def full_dtype[Name: str](name: str, allowed: tuple[Name, ...] = ("float32", "bfloat16")) -> Name:
    """`bf16` as `bfloat16`; ValueError where that is none of `allowed`."""
    full = SHORT.get(name, name)
    for each in allowed:
        if each == full:
            return each
    raise ValueError(f"dtype={name!r} is not supported: use {', '.join(allowed)}")
