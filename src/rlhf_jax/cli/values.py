"""Text to values, and values into the frozen tree."""

import contextlib
import dataclasses
import io
import math
from collections.abc import Mapping
from typing import Any

import tyro

from rlhf_jax.cli.fields import ConfigField


def read_value(field: ConfigField, texts: tuple[str, ...], label: str) -> object:
    """The value of the field's type; ValueError naming `label` where the text is none."""
    if field.type is str:
        return texts[0]
    if field.is_bool:
        return texts == ("True",)
    try:
        if field.type in (int, float):  # tyro takes milliseconds for each
            value = field.type(texts[0])
        else:
            with contextlib.redirect_stderr(io.StringIO()):
                value = tyro.cli(field.type, args=texts, add_help=False)
    except (ValueError, SystemExit):
        value = math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{label} must be {field.type_text}, got {' '.join(texts)!r}")
    return value


def replace_fields[Config](base: Config, values: Mapping[str, object], prefix: str = "") -> Config:
    """`base` with values by dotted path; a stage's range errors get the stage's name in front."""
    assert dataclasses.is_dataclass(base)
    assert not isinstance(base, type)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(base):
        value, path = getattr(base, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace_fields(value, values, f"{path}.")
        elif path in values:
            changes[field.name] = values[path]
    try:
        return dataclasses.replace(base, **changes)
    except ValueError as error:
        where = f"{prefix[:-1]}: " if prefix else ""
        raise ValueError(f"{where}{error}") from error
