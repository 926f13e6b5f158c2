"""The config tree as a flat list of fields: dotted path, type, value."""

import dataclasses
import types
from dataclasses import dataclass
from typing import Any, Literal, TypeAliasType, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ConfigField:
    """One leaf: `ppo.kl_coef`, its type and its value in the config that was walked."""

    path: str
    type: Any
    value: object

    @property
    def is_bool(self) -> bool:
        """A switch."""
        return self.type is bool

    @property
    def is_sequence(self) -> bool:
        """Takes any number of values."""
        return get_origin(self.type) is tuple

    @property
    def is_optional(self) -> bool:
        """May be None."""
        return types.NoneType in get_args(self.type)

    @property
    def type_text(self) -> str:
        """`int`, `int | None`, `str ...` (any number), `cosine|linear` (choices)."""
        return _type_text(self.type)

    @property
    def value_text(self) -> str:
        """The value as one would type it."""
        if isinstance(self.value, tuple):
            return " ".join(map(str, self.value)) or "(none)"
        return "''" if self.value == "" else str(self.value)


def config_fields(config: Any, prefix: str = "") -> dict[str, ConfigField]:
    """Every leaf of a tree of dataclasses by its dotted path, in the order of declaration."""
    hints = get_type_hints(type(config))
    found: dict[str, ConfigField] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= config_fields(value, f"{path}.")
        else:
            found[path] = ConfigField(path, _without_alias(hints[field.name]), value)
    return found


def flag_of(path: str) -> str:
    """`sft.learning_rate` as `--sft.learning-rate`."""
    return "--" + path.replace("_", "-")


def _without_alias(hint: Any) -> Any:
    return hint.__value__ if isinstance(hint, TypeAliasType) else hint


def _type_text(hint: Any) -> str:
    hint = _without_alias(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is tuple:
        return f"{_type_text(parts[0])} ..."
    if origin in (Union, types.UnionType):
        return " | ".join("None" if part is types.NoneType else _type_text(part) for part in parts)
    return hint.__name__
