"""What a run says of its settings."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from meshes.layout import parse_mesh
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.recipes.catalog import RECIPES
from rlhf_jax.recipes.nearest import nearest_recipe
from rlhf_jax.stages import pipeline, rollout_slots
from rlhf_jax.stages.memory_plan import GIB, Place
from rlhf_jax.stages.pipeline import settings_line


def test_settings_are_said_where_they_differ_from_the_recipe() -> None:
    cfg = RECIPES["quickstart"]()
    baseline = nearest_recipe(asdict(cfg))
    usual = "settings: runs/quickstart/config.yaml; as in the nearest recipe, quickstart"
    assert settings_line(cfg, baseline) == usual
    changed = replace(cfg, step=(1,), sft=replace(cfg.sft, max_steps=3))
    assert settings_line(changed, baseline) == f"{usual}, but step=[1], sft.max_steps=3"
    assert settings_line(cfg, None) == "settings: runs/quickstart/config.yaml"


def test_all_processes_refuse_what_does_not_fit_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refused alone would leave the others waiting for it."""
    cfg, place = replace(RECIPES["quickstart"](), step=(1,)), Place(parse_mesh("1x1"))
    first, other = np.array([1024], np.float32), 0.0001 * GIB
    monkeypatch.setattr(pipeline, "device_limit", lambda: int(other))
    monkeypatch.setattr(rollout_slots, "from_first_process", lambda make, shape: first)
    plans = pipeline.memory_plans(cfg, place, find_pretrained("quickstart"))
    assert plans["sft"].peak > other
