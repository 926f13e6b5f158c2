"""`remat=auto`: the least rematerialisation that device memory allows."""

from dataclasses import replace
from typing import Any

from rlhf_jax.models.remat import Remat
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.memory_plan import (
    TOLERANCE,
    Models,
    Place,
    Plan,
    gib,
    plan_stage,
    stage_settings,
)
from rlhf_jax.stages.rollout_slots import common_limit

FASTEST_FIRST: tuple[Remat, ...] = ("none", "dots", "mlp", "matrices")


def fit_remat(
    cfg: TrainConfig, stage: StageName, models: Models, place: Place, limit: int | None
) -> TrainConfig:
    """The config with `auto` replaced: by the fastest policy whose update fits in `limit` bytes of
    each device, even where the formulas are too low; else, and where devices do not say what they
    have, by `full`.
    """
    if stage_settings(cfg, stage).remat != "auto":
        return cfg
    limit = common_limit(limit)
    if limit is None:
        say(f"{stage}: remat=auto is full, devices do not say how much memory they have")
        return with_remat(cfg, stage, "full")
    for remat in FASTEST_FIRST:
        chosen = with_remat(cfg, stage, remat)
        plan = plan_stage(chosen, stage, models, place)
        if most(plan) <= limit:
            say(
                f"{stage}: remat=auto is {remat}, the update takes about {gib(updating(plan))} "
                f"of {gib(limit)} GiB"
            )
            return chosen
    say(f"{stage}: remat=auto is full, nothing less fits {gib(limit)} GiB")
    return with_remat(cfg, stage, "full")


def updating(plan: Plan) -> int:
    """Bytes on a device during an update."""
    return plan.resident + plan.programs["update"]


def most(plan: Plan) -> int:
    """The same where the formulas are too low by as much as they may be."""
    return plan.resident + int(plan.programs["update"] * (1 + TOLERANCE))


def with_remat(cfg: TrainConfig, stage: StageName, remat: Remat) -> TrainConfig:
    """The config with this policy in a stage."""
    changed: Any = {stage: replace(stage_settings(cfg, stage), remat=remat)}
    return replace(cfg, **changed)
