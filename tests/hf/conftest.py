"""Golden checkpoints (made by scripts/make_goldens.py) and loading them on a mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.hf.config_io import load_config
from rlhf_jax.hf.convert import LoadReport, load_with_report
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import param_specs, scalar_specs, store_layout

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def golden() -> Callable[[str], Path]:
    return lambda name: GOLDENS / name


@pytest.fixture
def layout_on() -> Callable[[str, ModelConfig], Layout]:
    """`layout_on("4x2", cfg)`: the layout that parameters are stored in."""

    def run(mesh: str, cfg: ModelConfig) -> Layout:
        shape = parse_mesh(mesh)
        return store_layout(cfg, make_mesh(shape, shape.tensor))

    return run


Loaded = tuple[Any, ModelConfig, LoadReport]


@pytest.fixture
def load(
    layout_on: Callable[[str, ModelConfig], Layout],
) -> Callable[..., Loaded]:
    """`load(directory, mesh, scalar=…, head=…, dtype=…)`: parameters, config and cost."""

    def run(
        directory: Path,
        mesh: str = "1x1",
        *,
        scalar: bool = False,
        head: Any = "load",
        dtype: Any = np.float32,
    ) -> Loaded:
        cfg = load_config(directory, scalar=scalar)
        specs = scalar_specs(cfg) if scalar else param_specs(cfg)
        params, report = load_with_report(
            directory, cfg, specs, layout_on(mesh, cfg), dtype, head=head
        )
        return params, cfg, report

    return run


def assert_same_trees(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def same_trees() -> Callable[[Any, Any], None]:
    return assert_same_trees
