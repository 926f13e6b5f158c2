"""How many devices share a model that decodes: what is fastest of what fits."""

from dataclasses import replace

import jax.numpy as jnp

from meshes.layout import MeshShape, check_inference_tp, default_inference_tp, even_inference_sizes
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, plan_ppo
from rlhf_jax.stages.rollout_slots import common_limit

BANDWIDTH = 4e12
"""Bytes a second that an H200 reads of weights."""
SUM_LATENCY = 20e-6
"""Seconds of a sum over two H200s in a decode step's graph beside what it carries (18 us, rounded
up: OPT-1.3B, 128 rows, 48 sums)."""
LINK_BANDWIDTH = 250e9
"""Bytes a second that an H200 receives from others of its host (an all-gather of 4 GB)."""


def choose_inference_tp(
    cfg: TrainConfig, models: Models, shape: MeshShape, platform: str, limit: int | None
) -> int:
    """`--inference-tp-size`; without it, on GPUs, the size whose decode steps are fastest of those
    that divide the heads, leave each share of the batch as many of the slots asked for, and fit in
    `limit` bytes of each device, without slots with all rows at once. Where none does, where
    devices do not say what they have, without step 3, and on a CPU, it is the largest.

    Raises:
        ValueError: the size asked for does not fit the mesh.
    """
    if cfg.inference_tp_size is not None:
        check_inference_tp(shape, cfg.inference_tp_size)
        return cfg.inference_tp_size
    actor, limit = models.actor, common_limit(limit)
    heads = actor.num_heads, actor.num_kv_heads
    if platform == "gpu" and limit is not None and "ppo" in cfg.stages:
        planned = replace(cfg, ppo=replace(cfg.ppo, remat="full"))  # not yet chosen if "auto"
        narrow = cfg.ppo.rollout_weights != "same"
        itemsize = 1 if narrow else jnp.dtype(cfg.dtype).itemsize
        slots = cfg.ppo.rollout_slots or 0
        rows = min(slots or cfg.ppo.batch_size, cfg.ppo.batch_size) / shape.num_devices
        sizes = even_inference_sizes(shape, *heads)
        for size in sorted(sizes, key=lambda size: step_seconds(actor, size, itemsize, rows)):
            if slots % (shape.num_devices // size):
                continue
            plan = plan_ppo(planned, models, Place(shape, size, platform))
            # A pinned copy stays for scoring.
            if plan.resident + max(plan.programs["generate"], plan.programs["score"]) <= limit:
                return size
    return default_inference_tp(shape, *heads)


def step_seconds(cfg: ModelConfig, inference_tp: int, itemsize: int, rows: float) -> float:
    """The part of a decode step that depends on how many devices share the model: reading its
    weights of `itemsize` bytes, and two sums a layer in 16 bits, of all their rows (`rows` for each
    of the devices). The cache is as large a device either way.
    """
    weights = itemsize * cfg.num_params() / inference_tp / BANDWIDTH
    if inference_tp == 1:
        return weights
    # A ring: every device receives all sums but its own, twice.
    received = 2 * (inference_tp - 1) * rows * cfg.width * 2
    return weights + 2 * cfg.num_layers * (SUM_LATENCY + received / LINK_BANDWIDTH)
