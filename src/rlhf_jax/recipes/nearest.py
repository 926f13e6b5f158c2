"""Which recipe a config comes from, as far as its settings tell."""

from collections.abc import Mapping
from typing import Any

from rlhf_jax.recipes.catalog import RECIPES
from rlhf_jax.runtime.report.settings import Baseline, written
from rlhf_jax.stages.run import flatten, flatten_mapping


def nearest_recipe(config: Mapping[str, Any]) -> Baseline:
    """The recipe from which the fewest settings of a nested config differ, with its settings."""
    flat = flatten_mapping(config)
    recipes = {name: flatten(make()) for name, make in RECIPES.items()}

    def num_differing(name: str) -> int:
        usual = recipes[name]
        return sum(written(flat[key]) != written(usual[key]) for key in flat.keys() & usual.keys())

    nearest = min(recipes, key=num_differing)
    return Baseline(f"the nearest recipe, {nearest}", recipes[nearest])
