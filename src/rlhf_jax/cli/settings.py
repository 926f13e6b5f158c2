"""Everything that was given, as one table of field and text."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshes.layout import parse_mesh
from rlhf_jax.cli.deepspeed_names import (
    NOT_NEEDED,
    OFF_VALUES,
    ONE_SWITCH,
    OPT_SIZES,
    REFUSED,
    VALUES,
    Target,
)
from rlhf_jax.cli.fields import ConfigField, flag_of
from rlhf_jax.cli.names import FIELDS, NAMES, resolve_name
from rlhf_jax.cli.tokens import Given
from rlhf_jax.stages.config import StageName

_SIZE = re.compile(r"\d+(\.\d+)?[mb]", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """A name that was given, and the values that its field takes (before rows per device)."""

    given: Given
    name: str
    values: tuple[str, ...]

    @property
    def target(self) -> Target:
        """The field that the name sets."""
        return NAMES[self.name]


type Settings = dict[str, Setting]
"""By config path, or by the name of a flag that is no field (`recipe`)."""


def collect(givens: Iterable[Given], stages: Sequence[StageName], notes: list[str]) -> Settings:
    """Settings of one source (the command line, or a file); explanations are added to `notes`.

    Raises:
        ValueError: an unknown or ambiguous name, one not offered, or two for the same field.
    """
    settings: Settings = {}
    for given in givens:
        if given.name in NOT_NEEDED:
            notes.append(f"{given.label} is not needed: {NOT_NEEDED[given.name]}")
        elif given.name in REFUSED:
            _refuse_unless_off(given)
        else:
            _add(settings, _setting(given, stages))
    return settings


def _refuse_unless_off(given: Given) -> None:
    if given.values and all(value.lower() in OFF_VALUES for value in given.values):
        return
    raise ValueError(f"{given.label} is not offered: {REFUSED[given.name]}. Leave it out")


def _setting(given: Given, stages: Sequence[StageName]) -> Setting:
    name, negated = resolve_name(given, stages)
    target = NAMES[name]
    field = FIELDS.get(target.path)
    if target.rule == "checkpointing":
        values = ("full" if _switch(given, negated) else "none",)
    elif target.rule == "tensorboard":
        values = ("tensorboard",) if _switch(given, negated) else ()
    elif field is not None and field.is_bool:
        values = (str(_switch(given, negated)),)
    elif negated:
        raise ValueError(f"{given.label}: only a switch can be negated, {flag_of(name)} is none")
    elif field is not None and field.is_sequence:
        values = _sequence(given)
    else:
        values = (_spelling(given, target.path, field),)
    return Setting(given, name, values)


def _switch(given: Given, negated: bool) -> bool:
    text = given.one_value.lower() if given.values else "true"
    if text not in ("true", "false"):
        raise ValueError(f"{given.label} is a switch: give no value, true or false, got {text!r}")
    return (text == "true") != negated


def _sequence(given: Given) -> tuple[str, ...]:
    """The values of a list. `none` empties it; nothing at all, as an unset shell variable leaves
    behind, is a mistake.
    """
    if not given.values and not given.file:
        raise ValueError(f"{given.label} takes one value or more, got none (`none` empties it)")
    return () if [value.lower() for value in given.values] == ["none"] else given.values


def _spelling(given: Given, path: str, field: ConfigField | None) -> str:
    """The value, with other people's words for it replaced."""
    value = given.one_value
    if value == "None" and given.file and field is not None and not field.is_optional:
        raise ValueError(f"{given.label} has no value: give it one, or leave it out")
    if path in ("actor_model", "reward_model"):
        return _model(given, value)
    if field is not None and field.is_optional and value.lower() in ("none", "null"):
        return "None"
    if path == "dtype" and value == "fp16":
        raise ValueError(
            f"{given.label}: float16 is not offered, it overflows. Use bfloat16 or float32"
        )
    return VALUES[path].get(value, value) if path in VALUES else value


def _model(given: Given, value: str) -> str:
    """`1.3b` as `facebook/opt-1.3b`; a path or a Hub name as it is."""
    if value.lower() in OPT_SIZES:
        return f"facebook/opt-{value.lower()}"
    if _SIZE.fullmatch(value) and not os.path.exists(value):
        raise ValueError(
            f"{given.label}: there is no OPT of size {value}. Sizes are {', '.join(OPT_SIZES)}; "
            "name other models in full, such as meta-llama/Llama-2-7b-hf"
        )
    return value


def _add(settings: Settings, setting: Setting) -> None:
    for path in (setting.target.path, *setting.target.also):
        if path in settings:
            _check_twice(settings[path], setting, path)
        settings[path] = setting


def _check_twice(first: Setting, setting: Setting, path: str) -> None:
    """ValueError for two names of one field, unless both may be given and agree."""
    if {first.name, setting.name} != ONE_SWITCH:
        here, there = setting.given.label, first.given.label
        if here == there:
            raise ValueError(f"{here} is given twice: give it once")
        raise ValueError(f"{there} and {here} both set {flag_of(path)}: give one of them")
    if first.values != setting.values:
        raise ValueError(
            f"{first.given.label} and {setting.given.label} contradict each other: one switch, "
            f"{flag_of(path)}, serves actor and critic"
        )


def field_values(
    settings: Settings, defaults: Mapping[str, ConfigField], notes: list[str]
) -> dict[str, tuple[str, ...]]:
    """Values by config path; rows per device are multiplied up with the mesh's devices."""
    values: dict[str, tuple[str, ...]] = {}
    for path, setting in settings.items():
        if path not in FIELDS:
            continue
        values[path] = setting.values
        if setting.target.rule in ("rows_per_device", "micro_rows_per_device"):
            values[path] = (str(_total_rows(setting, settings, defaults, notes)),)
        alpha = path.removesuffix("dim") + "alpha"
        adapters = setting.target.rule == "adapters" and setting.values != ("0",)
        if adapters and alpha not in settings:
            values[alpha] = ("1.0",)
            notes.append(f"{setting.given.label}: {flag_of(alpha)}=1, which is DeepSpeed-Chat's")
        if setting.target.note:
            notes.append(f"{setting.given.label}: {setting.target.note}")
    return values


def _total_rows(
    setting: Setting,
    settings: Settings,
    defaults: Mapping[str, ConfigField],
    notes: list[str],
) -> int:
    label, path = setting.given.label, setting.target.path
    mesh = settings["mesh"].values[0] if "mesh" in settings else str(defaults["mesh"].value)
    if mesh == "None":
        raise ValueError(
            f"{label} counts rows per device, so it needs the mesh: add --mesh, such as "
            f"--mesh=8x1, or give {flag_of(path)}, which counts the rows over all devices"
        )
    factors = [_integer(label, setting.values[0]), parse_mesh(mesh).num_devices]
    text = f"{factors[0]} rows x {factors[1]} devices"
    if setting.target.rule == "micro_rows_per_device":
        parts = f"{path.partition('.')[0]}.gradient_accumulation_steps"
        given = settings[parts].values[0] if parts in settings else str(defaults[parts].value)
        factors.append(_integer(flag_of(parts), given))
        text += f" x {factors[2]} accumulation steps"
    total = 1
    for factor in factors:
        total *= factor
    notes.append(f"{label}: {text} = {flag_of(path)}={total}")
    return total


def _integer(label: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{label} must be a whole number, got {text!r}") from None
