"""How many rows of a rollout decode at once: fewer than asked for where device memory ends."""

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from meshes.multihost import from_first_process
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, Plan, gib, memory_of, plan_ppo

MIB = 2**20
STEP = 8
"""Slots are a multiple of this on every share of the batch, where so many fit."""


def fit_slots(cfg: TrainConfig, models: Models, place: Place, limit: int | None) -> TrainConfig:
    """The config with `rollout_slots` that fit in `limit` bytes of each device beside the models;
    unchanged where all rows do, and where not even one a share does.

    Raises:
        ValueError: the slots asked for do not divide over the devices.
    """
    shares = memory_of(cfg, models.actor, place, cfg.ppo.actor_lora).rollout.batch_size_divisor
    asked = cfg.ppo.rollout_slots
    if asked is not None and asked % shares:
        raise ValueError(
            f"--ppo.rollout-slots={asked} does not divide over the {shares} parts that decoding "
            f"on --mesh={place.shape} cuts a batch into: use a multiple of {shares}"
        )
    limit = common_limit(limit)
    rows = min(asked or cfg.ppo.batch_size, cfg.ppo.batch_size)
    plan = plan_ppo(cfg, models, place)
    if limit is None or generating(plan) <= limit:
        return cfg
    sizes = list(range(shares, rows, shares))
    sizes = [size for size in sizes if size % (STEP * shares) == 0 or size < STEP * shares]
    fitting = bisect_right(
        sizes, limit, key=lambda size: generating(plan_ppo(with_slots(cfg, size), models, place))
    )
    if not fitting:
        return cfg
    found = sizes[fitting - 1]
    say(
        f"ppo: {rows} rows at once need {gib(plan.programs['generate'])} GiB to decode and "
        f"{gib(limit - plan.resident)} are left: {found} decode, and whichever ends makes room for "
        f"the next (as --ppo.rollout-slots={found})"
    )
    return with_slots(cfg, found)


def common_limit(limit: int | None) -> int | None:
    """That of the first process, to the mebibyte: all processes run the same programs."""
    if limit is None:
        return None
    return MIB * int(from_first_process(lambda: np.array([limit // MIB], np.float32), (1,))[0])


def generating(plan: Plan) -> int:
    """Bytes on a device during a rollout."""
    return plan.resident + plan.programs["generate"]


def with_slots(cfg: TrainConfig, slots: int) -> TrainConfig:
    """The config with so many."""
    return replace(cfg, ppo=replace(cfg.ppo, rollout_slots=slots))
