"""What a run says of its settings."""

from dataclasses import asdict, replace

from rlhf_jax.recipes.catalog import RECIPES
from rlhf_jax.recipes.nearest import nearest_recipe
from rlhf_jax.stages.pipeline import settings_line


def test_settings_are_said_where_they_differ_from_the_recipe() -> None:
    cfg = RECIPES["quickstart"]()
    baseline = nearest_recipe(asdict(cfg))
    usual = "settings: runs/quickstart/config.yaml; as in the nearest recipe, quickstart"
    assert settings_line(cfg, baseline) == usual
    changed = replace(cfg, step=(1,), sft=replace(cfg.sft, max_steps=3))
    assert settings_line(changed, baseline) == f"{usual}, but step=[1], sft.max_steps=3"
    assert settings_line(cfg, None) == "settings: runs/quickstart/config.yaml"
