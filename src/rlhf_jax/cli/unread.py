"""Flags that were typed and that this run does not read: said, since nothing else would show it."""

from collections.abc import Iterator, Sequence

from rlhf_jax.cli.fields import config_fields, flag_of
from rlhf_jax.cli.names import FIELDS, steps_text
from rlhf_jax.cli.settings import Settings
from rlhf_jax.stages.config import STAGES, StageName, TrainConfig

GATES = {
    "ppo.adaptive_kl_horizon": "ppo.adaptive_kl_target",
    "ppo.merge_lora": "ppo.actor_lora.dim",
    "ppo.standardize_score": "ppo.reward_model_weight",
}
"""Fields that another one switches on."""

SCHEDULES = {"lr_num_cycles": "cosine_with_restarts", "lr_power": "polynomial"}
"""Fields that one schedule reads."""


def unread_notes(
    typed: Settings, config: TrainConfig, stages: Sequence[StageName]
) -> Iterator[str]:
    """A line for each setting of the command line that sets nothing."""
    values = {path: field.value for path, field in config_fields(config).items()}
    for path, setting in typed.items():
        off = path not in FIELDS or values[path] in (None, ()) or values[path] is False
        if not off and (why := _why_unread(path, values, stages)):
            yield f"{setting.given.label} sets nothing: {why}"


def _why_unread(path: str, values: dict[str, object], stages: Sequence[StageName]) -> str:
    """Empty where it is read."""
    if path in ("actor_model", "reward_model"):
        return _why_unread_model(path, values, stages)
    parent, _, leaf = path.rpartition(".")
    stage = path.partition(".")[0]
    if stage in STAGES.values() and stage not in stages:
        return steps_text(stages)
    gate = GATES.get(path, "")
    if path == "ppo.critic_from" and values[path] == "reward_model":
        gate = "ppo.reward_model_weight"
    if parent.endswith("lora") and leaf != "dim":
        gate = f"{parent}.dim"
    if parent.endswith(".ema") and leaf != "enable":
        gate = f"{parent}.enable"
    if gate and not values[gate]:
        return f"{flag_of(gate)} is {str(values[gate]).lower()}"
    if leaf in SCHEDULES and values[f"{parent}.lr_scheduler_type"] != SCHEDULES[leaf]:
        return f"{flag_of(f'{parent}.lr_scheduler_type')} is not {SCHEDULES[leaf]}"
    return ""


def _why_unread_model(path: str, values: dict[str, object], stages: Sequence[StageName]) -> str:
    """Step 2 starts from one of the two, step 3 reads the reward model where step 2 does not run;
    all others start from the actor.
    """
    start = values["reward.train_from"]
    if path == "actor_model":
        return "only step 2 runs" if tuple(stages) == ("reward",) and start != "actor" else ""
    if "reward" in stages:
        return "--reward.train-from is actor" if start == "actor" else ""
    if "ppo" in stages:
        return "" if values["ppo.reward_model_weight"] else "--ppo.reward-model-weight is 0.0"
    return steps_text(stages)
