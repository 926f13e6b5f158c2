"""The recipes by name, and by deployment and model."""

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import get_args

from rlhf_jax.models.families import SIZES
from rlhf_jax.recipes import llama, opt, smollm2
from rlhf_jax.recipes.deepspeed_chat import deepspeed_chat, with_deepspeed_rules
from rlhf_jax.recipes.opt import Deployment
from rlhf_jax.recipes.quickstart import quickstart
from rlhf_jax.stages.config import TrainConfig

DEEPSPEED_CHAT = "deepspeed-chat"

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "quickstart": quickstart,
    "opt": opt.opt,
    DEEPSPEED_CHAT: deepspeed_chat,
    "opt-1.3b-single-gpu": opt.opt_1_3b_single_gpu,
    "opt-6.7b-single-gpu": opt.opt_6_7b_single_gpu,
    "opt-1.3b-single-node": opt.opt_1_3b_single_node,
    "opt-1.3b-lora-single-node": opt.opt_1_3b_lora_single_node,
    "opt-6.7b-single-node": opt.opt_6_7b_single_node,
    "opt-13b-single-node": opt.opt_13b_single_node,
    "opt-30b-single-node": opt.opt_30b_single_node,
    "opt-30b-multi-node": opt.opt_30b_multi_node,
    "opt-66b-multi-node": opt.opt_66b_multi_node,
    "opt-175b-multi-node": opt.opt_175b_multi_node,
    "llama-2-7b": llama.llama_2_7b,
    "llama-2-7b-lora": llama.llama_2_7b_lora,
    "smollm2-hh": smollm2.smollm2_hh,
    "smollm2-gsm8k": smollm2.smollm2_gsm8k,
}

DEPLOYMENTS: tuple[Deployment, ...] = get_args(Deployment)

BY_DEPLOYMENT: dict[Deployment, dict[str, str]] = {
    "single_gpu": {
        "facebook/opt-1.3b": "opt-1.3b-single-gpu",
        "facebook/opt-6.7b": "opt-6.7b-single-gpu",
    },
    "single_node": {
        "facebook/opt-1.3b": "opt-1.3b-single-node",
        "facebook/opt-6.7b": "opt-6.7b-single-node",
        "facebook/opt-13b": "opt-13b-single-node",
        "facebook/opt-30b": "opt-30b-single-node",
        llama.LLAMA_2_7B: "llama-2-7b",
    },
    "multi_node": {
        "facebook/opt-30b": "opt-30b-multi-node",
        "facebook/opt-66b": "opt-66b-multi-node",
        "facebook/opt-175b": "opt-175b-multi-node",
    },
}
"""The recipe of an actor, by deployment."""


def make_recipe(name: str) -> TrainConfig:
    """The complete config of a recipe; ValueError with the nearest name where there is none."""
    if name in RECIPES:
        return RECIPES[name]()
    near = get_close_matches(name.replace("_", "-"), RECIPES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? There" if near else "there"
    raise ValueError(f"unknown recipe {name!r}: {hint} are {', '.join(RECIPES)}")


def deployed_recipe(deployment: Deployment, actor: str) -> tuple[str, str]:
    """The recipe of an actor (a Hub name or a directory) on a deployment, and why it is this one.

    Without settings of that size the nearest: of the same family where there is one, and the
    smallest where nothing is known of the actor's size.
    """
    table = BY_DEPLOYMENT[deployment]
    if actor in table:
        return table[actor], "its settings"
    there = ", ".join(table)
    if actor not in SIZES:
        return next(iter(table.values())), f"there are settings of {there}: --recipe picks others"
    family, size = SIZES[actor].family, SIZES[actor].num_params()
    models = [name for name in table if SIZES[name].family == family] or list(table)
    nearest = min(models, key=lambda name: abs(math.log(SIZES[name].num_params() / size)))
    return table[nearest], f"the nearest to {actor} of {there}"


def under_rules(name: str, config: TrainConfig) -> TrainConfig:
    """A deployment's settings under the rules of the recipe that was named with it."""
    return with_deepspeed_rules(config) if name == DEEPSPEED_CHAT else config
