"""The moving average in host memory: the same numbers, and it stays there, over a resume too."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.offload import is_on_host
from rlhf_jax.engine import ema as ema_module
from rlhf_jax.engine.ema import EMAConfig, average_params, ema_program, start_ema
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.runtime.checkpoint import Checkpoints
from tests.engine.toy import SPECS, parameters
from tests.models.cases import put_params


def state(layout: Layout, dtype: str, seed: int) -> TrainState:
    """Toy weights, sharded."""
    params = put_params(
        jax.tree.map(np.asarray, parameters(seed=seed)), SPECS, layout, jnp.dtype(dtype)
    )
    return create_state(params, make_optimizer(OptimizerConfig(1e-3), SPECS, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_the_average_changes_no_number(dtype: str, tmp_path: Path) -> None:
    layout = Layout.create(make_mesh(parse_mesh("4x1"), 1), "store", {"mlp": 4})
    cfg = EMAConfig(enable=True, decay=0.9, start=1, interval=2, offload=True)
    average = ema_program(cfg)
    with jax.set_mesh(layout.mesh), Checkpoints(tmp_path, 1) as checkpoints:
        first = state(layout, dtype, 0)
        here, there = (start_ema(first, offload=offload) for offload in (False, True))
        now = first
        for n in range(1, 5):
            now = state(layout, dtype, n)
            here, there = average(here, now), average(there, now)
            if n == 2:
                checkpoints.save(n, there, {})
                checkpoints.wait()
                there = checkpoints.restore(n, start_ema(first, offload=True))
            for one, other in zip(
                jax.tree.leaves(here.weights), jax.tree.leaves(there.weights), strict=True
            ):
                np.testing.assert_array_equal(one, other)
                assert is_on_host(other)
                assert other.sharding.spec == one.sharding.spec
        policies = [average_params(ema, now) for ema in (here, there)]
        for one, other in zip(*map(jax.tree.leaves, policies), strict=True):
            np.testing.assert_array_equal(one, other)
            assert other.dtype == dtype
            assert not is_on_host(other)


def test_it_asks_whether_there_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise ValueError(f"no host memory beside {device}")

    layout = Layout.create(make_mesh(parse_mesh("1x1"), 1), "store", {"mlp": 4})
    with jax.set_mesh(layout.mesh):
        plain = state(layout, "float32", 0)
        monkeypatch.setattr(ema_module, "check_host_memory", refuse)
        start_ema(plain)
        with pytest.raises(ValueError, match="no host memory"):
            start_ema(plain, offload=True)
