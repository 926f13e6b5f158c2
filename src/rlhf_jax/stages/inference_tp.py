"""How many devices share a model that decodes: what is fastest of what fits."""

from dataclasses import replace

from meshes.layout import MeshShape, check_inference_tp, default_inference_tp, even_inference_sizes
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, plan_ppo
from rlhf_jax.stages.rollout_slots import common_limit, generating

BANDWIDTH = 4e12
"""Bytes a second that an H200 reads of weights."""
SUM_SECONDS = 33e-6
"""What a sum over two H200s costs a decode step of OPT-1.3B (128 rows, 48 sums): XLA's all-reduce
is no part of a graph, so the host launches it and the graph behind it."""


def choose_inference_tp(
    cfg: TrainConfig, models: Models, shape: MeshShape, platform: str, limit: int | None
) -> int:
    """`--inference-tp-size`; without it, on GPUs, the size whose decode steps are fastest of those
    that divide the heads and fit in `limit` bytes of each device with all rows at once. Where none
    does, where devices do not say what they have, and on a CPU, it is the largest.

    Raises:
        ValueError: the size asked for does not fit the mesh.
    """
    if cfg.inference_tp_size is not None:
        check_inference_tp(shape, cfg.inference_tp_size)
        return cfg.inference_tp_size
    actor, limit = models.actor, common_limit(limit)
    heads = actor.num_heads, actor.num_kv_heads
    if platform == "gpu" and limit is not None and "ppo" in cfg.stages:
        whole = replace(cfg.ppo, rollout_slots=None, remat="full")  # not yet chosen if "auto"
        sizes = even_inference_sizes(shape, *heads)
        for size in sorted(sizes, key=lambda size: step_seconds(actor, size)):
            plan = plan_ppo(replace(cfg, ppo=whole), models, Place(shape, size, platform))
            if generating(plan) <= limit:
                return size
    return default_inference_tp(shape, *heads)


def step_seconds(cfg: ModelConfig, inference_tp: int) -> float:
    """The part of a decode step in bfloat16 that depends on how many devices share the model:
    reading its weights, and two sums a layer. Rows and heads are as many a device either way.
    """
    weights = 2 * cfg.num_params() / inference_tp / BANDWIDTH
    return weights + (2 * cfg.num_layers * SUM_SECONDS if inference_tp > 1 else 0.0)
