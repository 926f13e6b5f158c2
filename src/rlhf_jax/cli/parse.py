"""From argv to a frozen TrainConfig.

The flags of a YAML file (`--config`) come first, those of the command line override them, and both
change a recipe. Names are resolved first (repeats, stages, DeepSpeed-Chat's names); then every
value, wherever it came from, is text that tyro reads by the type of its field.
"""

import sys
from collections.abc import Sequence

import tyro

from meshes.layout import parse_mesh
from rlhf_jax.cli.config_file import read_config_file
from rlhf_jax.cli.fields import config_fields
from rlhf_jax.cli.settings import Setting, Settings, collect, field_values
from rlhf_jax.cli.tokens import Given, split_argv
from rlhf_jax.cli.values import read_value, replace_fields
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.recipes.catalog import RECIPES, make_recipe
from rlhf_jax.stages.config import STAGE_NUMBERS, StageName, TrainConfig

PROG = "python -m rlhf_jax.train"
HELP_FLAGS = ("-h", "--help")
DEPLOYMENTS = ("single_gpu", "single_node", "multi_node")


def parse(argv: Sequence[str] | None = None) -> TrainConfig:
    """The config of a command line (`sys.argv[1:]` by default). Notes are printed to stderr.

    Raises:
        ValueError: a flag, key or value that is wrong, in one line for the user.
        FileNotFoundError: `--config` names no file.
        SystemExit: after `--help`, with code 0.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    wants_help = any(token in HELP_FLAGS for token in argv)
    config, notes = resolve([token for token in argv if token not in HELP_FLAGS])
    if wants_help:
        tyro.cli(TrainConfig, prog=PROG, description=_about(), args=["--help"], default=config)
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    return config


def resolve(argv: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The config, and what the user should be told about how it came about."""
    notes: list[str] = []
    typed = split_argv(argv)
    filed = _read_config_flag(typed)
    stages = _stages(typed, filed)
    settings = collect(filed, stages, notes) | collect(typed, stages, notes)
    recipe = _recipe_name(settings)
    base = make_recipe(recipe)
    _apply_deployment(settings, recipe, notes)
    _tell_models(settings, base, stages, notes)
    return _set_fields(settings, base, notes), notes


def _read_config_flag(typed: list[Given]) -> list[Given]:
    files = [given.one_value for given in typed if given.name == "config"]
    return read_config_file(files[0]) if files else []


def _stages(typed: list[Given], filed: list[Given]) -> tuple[StageName, ...]:
    """Which stages run: flat names depend on it, so it is known before all else."""
    for given in [*typed, *filed]:
        if given.name == "step":
            names: dict[str, StageName] = {str(n): stage for n, stage in STAGE_NUMBERS.items()}
            if not given.values or not set(given.values) <= set(names):
                got = " ".join(given.values) or "nothing"
                raise ValueError(f"{given.label} takes any of 1 2 3, got {got}")
            return tuple(names[value] for value in given.values)
    return tuple(STAGE_NUMBERS.values())


def _recipe_name(settings: Settings) -> str:
    """`--recipe`; without it `opt` where a model is named, else `quickstart`."""
    if "recipe" in settings:
        return settings["recipe"].values[0]
    for model in ("actor_model", "reward_model"):
        if model in settings:
            return QUICKSTART if settings[model].values[0] == QUICKSTART else "opt"
    return QUICKSTART


def _apply_deployment(settings: Settings, recipe: str, notes: list[str]) -> None:
    """`--deployment-type` as a mesh: one device, or all of them."""
    setting = settings.get("deployment_type")
    if setting is None:
        return
    kind, label = setting.values[0], setting.given.label
    if kind not in DEPLOYMENTS:
        raise ValueError(f"{label} is one of {', '.join(DEPLOYMENTS)}, got {kind!r}")
    mesh = settings["mesh"].values[0] if "mesh" in settings else "None"
    if kind == "single_gpu" and mesh == "None":
        settings["mesh"] = Setting(setting.given, "mesh", ("1x1",))
    elif kind == "single_gpu" and parse_mesh(mesh).num_devices > 1:
        raise ValueError(f"{label}=single_gpu contradicts --mesh={mesh}: give one of them")
    shape = {"single_gpu": "1x1", "single_node": "all devices of this node, as Nx1"}
    where = shape.get(kind, "all devices of all nodes, as Nx1") if mesh == "None" else mesh
    notes.append(f"{label}={kind}: the mesh is {where}; sizes and rates are the recipe {recipe}'s")


def _tell_models(
    settings: Settings, base: TrainConfig, stages: Sequence[StageName], notes: list[str]
) -> None:
    """Say which reward model is taken where only the actor was named."""
    named = "actor_model" in settings and "reward_model" not in settings
    if named and stages != ("sft",) and base.reward_model != QUICKSTART:
        notes.append(f"the reward model is {base.reward_model}: --reward-model names another")


def _set_fields(settings: Settings, base: TrainConfig, notes: list[str]) -> TrainConfig:
    fields = config_fields(base)
    return replace_fields(
        base,
        {
            path: read_value(fields[path], texts, settings[path].given.label)
            for path, texts in field_values(settings, fields, notes).items()
        },
    )


def _about() -> str:
    """Paragraphs above the flags in --help."""
    return "\n\n".join(
        (
            "RLHF in three steps: supervised fine-tuning, a reward model, PPO.",
            f"--recipe={{{','.join(RECIPES)}}} picks the settings that flags change; "
            "without it quickstart, or opt when a model is named.",
            "--config=FILE.yaml sets the same names. Flags override it.",
            "A name without its stage (--learning-rate) belongs to the one running stage that "
            "has it (--step 1).",
            "DeepSpeed-Chat's names work too (docs/flags.md), and "
            f"--deployment-type={{{','.join(DEPLOYMENTS)}}}.",
        )
    )
