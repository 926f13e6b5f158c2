"""The settings of a run beside those that it started from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Baseline:
    """What settings are compared with: their values by dotted name, and where these come from."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class SettingLine:
    """One line of the config."""

    depth: int
    name: str
    value: str | None
    changed: bool
    default: str = ""


def setting_lines(
    config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[SettingLine]:
    """The config line by line; a section has no value."""
    for name, value in config.items():
        dotted = prefix + name
        if isinstance(value, Mapping):
            yield SettingLine(depth, name, None, changed=False)
            yield from setting_lines(value, defaults, f"{dotted}.", depth + 1)
        else:
            usual = written(defaults[dotted]) if dotted in defaults else ""
            changed = dotted in defaults and written(value) != usual
            yield SettingLine(depth, name, written(value), changed, usual)


def written(value: object) -> str:
    """A setting as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value) if value != "" else "''"
