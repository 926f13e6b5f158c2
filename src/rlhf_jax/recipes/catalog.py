"""The recipes by name."""

from collections.abc import Callable
from difflib import get_close_matches

from rlhf_jax.recipes.llama import llama
from rlhf_jax.recipes.opt import deepspeed_chat, opt
from rlhf_jax.recipes.quickstart import quickstart
from rlhf_jax.stages.config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "quickstart": quickstart,
    "opt": opt,
    "deepspeed-chat": deepspeed_chat,
    "llama": llama,
}


def make_recipe(name: str) -> TrainConfig:
    """The complete config of a recipe; ValueError with the nearest name where there is none."""
    if name in RECIPES:
        return RECIPES[name]()
    near = get_close_matches(name.replace("_", "-"), RECIPES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"unknown recipe {name!r}: {hint}There are {', '.join(RECIPES)}")
