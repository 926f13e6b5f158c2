"""From argv to a frozen TrainConfig.

The flags of a YAML file (`--config`) come first, those of the command line override them, and both
change a recipe. Names are resolved first (repeats, stages, DeepSpeed-Chat's names); then every
value, wherever it came from, is text that tyro reads by the type of its field.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from meshes.layout import parse_mesh
from rlhf_jax.cli.config_file import read_config_file
from rlhf_jax.cli.fields import config_fields
from rlhf_jax.cli.settings import Setting, Settings, collect, field_values
from rlhf_jax.cli.tokens import Given, split_argv
from rlhf_jax.cli.unread import unread_notes
from rlhf_jax.cli.values import read_value, replace_fields
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.recipes.catalog import (
    DEEPSPEED_CHAT,
    DEPLOYMENTS,
    RECIPES,
    deployed_recipe,
    make_recipe,
    under_rules,
)
from rlhf_jax.recipes.opt import DEVICES, Deployment
from rlhf_jax.stages.config import STAGES, StageName, TrainConfig

PROG = "python -m rlhf_jax.train"
HELP_FLAGS = ("-h", "--help")
WEIGHT = "ppo.reward_model_weight"
DEFAULT_ACTOR = "facebook/opt-1.3b"
"""DeepSpeed-Chat's, where --deployment-type and a reward model are given alone."""


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
    flags = collect(typed, stages, notes)
    settings = collect(filed, stages, notes) | flags
    base = _base(settings, notes)
    _let_functions_score_alone(settings, base, stages, notes)
    config = _set_fields(settings, base, notes)
    _tell_models(settings, config, notes)
    return config, [*notes, *unread_notes(flags, config, stages)]


def _read_config_flag(typed: list[Given]) -> list[Given]:
    files = [given.one_value for given in typed if given.name == "config"]
    return read_config_file(files[0]) if files else []


def _stages(typed: list[Given], filed: list[Given]) -> tuple[StageName, ...]:
    """Which stages run: flat names depend on it, so it is known before all else."""
    for given in [*typed, *filed]:
        if given.name == "step":
            names: dict[str, StageName] = {str(step): stage for step, stage in STAGES.items()}
            if not given.values or not set(given.values) <= set(names):
                got = " ".join(given.values) or "nothing"
                raise ValueError(f"{given.label} takes any of 1 2 3, or dpo, got {got}")
            return tuple(names[value] for value in given.values)
    recipe = next((given for given in [*typed, *filed] if given.name == "recipe"), None)
    return (TrainConfig() if recipe is None else make_recipe(recipe.one_value)).stages


def _recipe_name(settings: Settings) -> str:
    """`--recipe`; without it `opt` where a model is named, else `quickstart`."""
    if "recipe" in settings:
        return settings["recipe"].values[0]
    for model in ("actor_model", "reward_model"):
        if model in settings:
            return QUICKSTART if settings[model].values[0] == QUICKSTART else "opt"
    return QUICKSTART


def _base(settings: Settings, notes: list[str]) -> TrainConfig:
    """The recipe that flags change. With `--deployment-type` it follows the actor, unless another
    one is named: `deepspeed-chat` then gives its rules to the settings of that size.
    """
    name = _recipe_name(settings)
    if "deployment_type" not in settings:
        return make_recipe(name)
    label = settings["deployment_type"].given.label
    kind = _deployment(settings["deployment_type"].values[0], label)
    follows = name == DEEPSPEED_CHAT or (name == "opt" and "recipe" not in settings)
    picked, why = name, "the one that was named" if "recipe" in settings else "the default"
    if follows:
        actor = settings["actor_model"].values[0] if "actor_model" in settings else DEFAULT_ACTOR
        picked, why = deployed_recipe(kind, actor)
        why += f", for {DEVICES[kind]} device{'s' if DEVICES[kind] > 1 else ''}"
    base = make_recipe(picked)
    where = _deployed_mesh(settings, base, kind, label)
    notes.append(
        f"{label}={kind}: the mesh is {where}; sizes and rates are the recipe {picked}'s ({why})"
    )
    return under_rules(name, base) if follows else base


def _deployment(text: str, label: str) -> Deployment:
    for kind in DEPLOYMENTS:
        if kind == text:
            return kind
    raise ValueError(f"{label} is one of {', '.join(DEPLOYMENTS)}, got {text!r}")


def _deployed_mesh(settings: Settings, base: TrainConfig, kind: Deployment, label: str) -> str:
    """The mesh of a deployment in words; for one device it is set."""
    mesh = settings["mesh"].values[0] if "mesh" in settings else "None"
    if kind == "single_gpu":
        if mesh == "None":
            settings["mesh"] = Setting(settings["deployment_type"].given, "mesh", ("1x1",))
        elif parse_mesh(mesh).num_devices > 1:
            raise ValueError(f"{label}=single_gpu contradicts --mesh={mesh}: give one of them")
        return "1x1"
    mesh = base.mesh if mesh == "None" else mesh
    return mesh or f"all devices of {'this node' if kind == 'single_node' else 'all nodes'}, as Nx1"


def _let_functions_score_alone(
    settings: Settings, base: TrainConfig, stages: Sequence[StageName], notes: list[str]
) -> None:
    """Reward functions mean no reward model where none is trained, named or weighted."""
    functions = settings.get("ppo.reward_fn")
    asked = {"reward_model", WEIGHT} & set(settings)
    if functions is None or not functions.values or asked or stages[-1:] != ("ppo",):
        return
    directory = settings["output_dir"].values[0] if "output_dir" in settings else base.output_dir
    resumed = "resume" in settings and settings["resume"].values == ("True",)
    if "reward" in stages or (resumed and (Path(directory) / "reward").exists()):
        return
    settings[WEIGHT] = Setting(functions.given, WEIGHT, ("0.0",))
    notes.append(
        f"{functions.given.label}: functions score alone; --reward-model names a reward model "
        "beside them"
    )


def _tell_models(settings: Settings, config: TrainConfig, notes: list[str]) -> None:
    """Say which reward model is taken where only the actor was named."""
    named = "actor_model" in settings and "reward_model" not in settings
    scored = "ppo" in config.stages and config.ppo.reward_model_weight
    if named and ("reward" in config.stages or scored) and config.reward_model != QUICKSTART:
        notes.append(f"the reward model is {config.reward_model}: --reward-model names another")


def _set_fields(settings: Settings, base: TrainConfig, notes: list[str]) -> TrainConfig:
    fields = config_fields(base)
    return replace_fields(
        base,
        {
            path: read_value(
                fields[path], texts, settings[path].given.label if path in settings else path
            )
            for path, texts in field_values(settings, fields, notes).items()
        },
    )


def _about() -> str:
    """Paragraphs above the flags in --help."""
    return "\n\n".join(
        (
            "RLHF in three steps: supervised fine-tuning, a reward model, PPO; or DPO in place of "
            "the last two (--step 1 dpo).",
            f"--recipe={{{','.join(RECIPES)}}} picks the settings that flags change; "
            "without it quickstart, or opt when a model is named.",
            "--config=FILE.yaml sets the same names. Flags override it.",
            "A name without its stage (--learning-rate) belongs to the one running stage that "
            "has it (--step 1).",
            "DeepSpeed-Chat's names work too (docs/flags.md), and "
            f"--deployment-type={{{','.join(DEPLOYMENTS)}}}.",
        )
    )
