"""What a name means: the field that it sets, given which stages run."""

from collections.abc import Sequence
from difflib import get_close_matches

from rlhf_jax.cli.deepspeed_names import NOT_NEEDED, REFUSED, RENAMED, Target
from rlhf_jax.cli.fields import config_fields, flag_of
from rlhf_jax.cli.peer_names import NO_COUNTERPART, PEER_NAMES
from rlhf_jax.cli.tokens import Given
from rlhf_jax.stages.config import STAGES, StageName, TrainConfig

FIELDS = config_fields(TrainConfig())
"""Every field of the config; the values are those of no recipe."""

OWN_FLAGS = {
    "recipe": "the settings that all flags change",
    "config": "a YAML file, read before the flags",
    "deployment_type": "single_gpu, single_node or multi_node",
}
"""Flags that are not fields of the config."""

NAMES: dict[str, Target] = {path: Target(path) for path in (*FIELDS, *OWN_FLAGS)} | RENAMED


def resolve_name(given: Given, stages: Sequence[StageName]) -> tuple[str, bool]:
    """The key in NAMES for what was given, and whether it was negated (`--ppo.no-train-eos`).

    A name without its stage in front (`learning_rate`, `lora.dim`) belongs to the only field that
    ends in it, or else to the only one of a running stage. Of nested fields the outer one counts:
    `learning_rate` is not `lora.learning_rate`.

    Raises:
        ValueError: unknown; or several running stages have it, or none of those that have it runs.
    """
    negated = _positive(given.name)
    for name, negative in ((given.name, False), (negated, True)):
        owners = [name] if name in NAMES else _owners(name)
        if len(owners) > 1:
            owners = [_running_owner(given, owners, stages)]
        if owners:
            return owners[0], negative
    raise ValueError(_unknown(given))


def _positive(name: str) -> str:
    """`ppo.no_train_eos` as `ppo.train_eos`; empty where nothing is negated."""
    parent, dot, leaf = name.rpartition(".")
    return f"{parent}{dot}{leaf.removeprefix('no_')}" if leaf.startswith("no_") else ""


def _owners(name: str) -> list[str]:
    """The names that end in this one, those with the fewest parts."""
    found = [full for full in NAMES if name and full.endswith(f".{name}")]
    depth = min((full.count(".") for full in found), default=0)
    return [full for full in found if full.count(".") == depth]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _running_owner(given: Given, owners: list[str], stages: Sequence[StageName]) -> str:
    running = [owner for owner in owners if owner.partition(".")[0] in stages]
    if len(running) == 1:
        return running[0]
    if running:
        raise ValueError(
            f"{given.label} could mean each of {_spelled(running, given)}, since "
            f"{steps_text(stages)}: give the full name, or run one stage (--step)"
        )
    similar = [
        path
        for path in FIELDS
        if path.partition(".")[0] in stages and path.endswith(f"_{_leaf(given.name)}")
    ]
    hint = f". It has {_spelled(similar, given)}" if similar else ""
    raise ValueError(
        f"{given.label} belongs to {_spelled(owners, given)}, but {steps_text(stages)}{hint}"
    )


def steps_text(stages: Sequence[StageName]) -> str:
    """`only step 1 runs`, `steps 1, 2 and 3 run`."""
    steps = [str(step) for step, stage in STAGES.items() if stage in stages]
    if len(steps) == 1:
        return f"only step {steps[0]} runs"
    return f"steps {', '.join(steps[:-1])} and {steps[-1]} run"


def _spelled(names: Sequence[str], given: Given) -> str:
    return ", ".join(name if given.file else flag_of(name) for name in names)


def _unknown(given: Given) -> str:
    kind = f"unknown flag {given.label}"
    if given.file:
        kind = f"{given.file}: unknown key {given.name}"
    inside = [path for path in FIELDS if path.startswith(f"{given.name}.")]
    if inside:
        return f"{kind}: it is a group of settings, such as {_spelled(inside[:1], given)}"
    if reason := NO_COUNTERPART.get(_leaf(given.name)):
        return f"{kind}: {reason}"
    everything = [*NAMES, *(_leaf(name) for name in NAMES), *NOT_NEEDED, *REFUSED]
    near = get_close_matches(given.name, everything, n=1, cutoff=0.6)
    if peer := _peers_name(given.name):
        near = [peer]
    if not near:
        return f"{kind}: --help lists all flags, docs/flags.md DeepSpeed-Chat's"
    return f"{kind}: did you mean {_spelled(near, given)}?"


def _peers_name(name: str) -> str | None:
    """Our name for another library's: `sft.lora.rank` is `sft.lora.dim`."""
    parts = name.split(".")
    for start in range(len(parts)):
        if ours := PEER_NAMES.get("_".join(parts[start:])):
            full = ".".join([*parts[:start], ours])
            return full if full in NAMES else ours
    return None
