"""Masters and moments in host memory: no number changes, wherever a layer is updated."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.offload import is_on_host
from rlhf_jax.engine.ema import EMAConfig, ema_program, start_ema
from rlhf_jax.engine.moments import split_state
from rlhf_jax.engine.offloaded import apply_offloaded, create_offloaded, pieces
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import apply_gradients, create_state
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, split, trains
from rlhf_jax.models.params import param_specs, scalar_specs, store_layout
from rlhf_jax.runtime.checkpoint import Checkpoints
from tests.models.cases import LLAMA, put_params, random_values

CFG = replace(LLAMA, vocab_size=256, width=128, embed_width=128, mlp_width=256)
"""Matrices wide enough to have rows and columns of their own in Adafactor."""
MIXED = LoRAConfig(dim=2, modules=("q_proj", "v_proj", "down_proj"))
ADAM = OptimizerConfig(1e-2, weight_decay=0.1, warmup_steps=2, clip_norm=1.0)
STEPS = 4


def start(lora: LoRAConfig, dtype: Any, scalar: bool) -> tuple[Any, Any, Any]:
    """The declarations of what trains, a function that makes it anew, and the mesh."""
    mesh = make_mesh(parse_mesh("4x2"), 2)
    plain = scalar_specs(CFG) if scalar else param_specs(CFG)
    specs = adapted_specs(plain, CFG, lora)
    trained = split(specs, trains(specs, lora))[0]

    def fresh(seed: int) -> Any:
        values = random_values(trained, seed=seed)
        return put_params(values, trained, store_layout(CFG, mesh), dtype)

    return trained, fresh, mesh


CASES = {
    "adamw": (ADAM, LoRAConfig(), jnp.bfloat16, False),
    "adapters_of_a_critic": (ADAM, MIXED, jnp.bfloat16, True),
    "float32": (ADAM, LoRAConfig(), jnp.float32, False),
    "lion": (replace(ADAM, optim="lion"), LoRAConfig(), jnp.bfloat16, False),
    "bfloat16_moments": (replace(ADAM, moments_dtype="bfloat16"), MIXED, jnp.bfloat16, False),
    "adafactor": (replace(ADAM, optim="adafactor"), LoRAConfig(), jnp.bfloat16, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_offloading_changes_no_number(case, tmp_path):
    """Steps of which one is clipped, one skipped and one not allowed; the state goes through a
    checkpoint.
    """
    cfg, lora, dtype, scalar = case
    specs, fresh, mesh = start(lora, dtype, scalar)
    optimizer = make_optimizer(cfg, specs, 10, adapter_rate=5e-3 if lora.dim else None)
    apply = jax.jit(partial(apply_gradients, optimizer=optimizer), donate_argnums=0)
    with jax.set_mesh(mesh), Checkpoints(tmp_path) as checkpoints:
        here = create_state(fresh(0), optimizer)
        there = create_offloaded(fresh(0), optimizer)
        for step in range(STEPS):
            grads = jax.tree.map(lambda g, s=step: g.astype(jnp.float32) * 0.1**s, fresh(step + 1))
            finite, norm = jnp.bool_(step != 1), optax.tree.norm(grads)
            allowed = jnp.bool_(step != 2)
            here = apply(here, grads, finite=finite, allowed=allowed)
            there = apply_offloaded(there, grads, optimizer, norm, finite, allowed=allowed)
            if step == 0:
                checkpoints.save(step, there, {})
                checkpoints.wait()
                there = checkpoints.restore(step, there)
    assert jax.tree.structure(here) == jax.tree.structure(there)
    moved = jax.tree.leaves(there.master)
    parts, _ = split_state(there.opt_state[1], there.params)
    moved += [leaf for part in parts if isinstance(part, list) for leaf in part]
    assert moved
    assert all(is_on_host(leaf) for leaf in moved)
    assert not any(is_on_host(leaf) for leaf in jax.tree.leaves(there.params))
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert one.dtype == other.dtype
        assert one.sharding.spec == other.sharding.spec
        # Two compilations of one formula: where they fuse differently the last bit may differ.
        spacing = 2e-2 if one.dtype == jnp.bfloat16 else 1e-5
        near = np.isclose(np.asarray(one, np.float32), np.asarray(other, np.float32), spacing, 1e-7)
        assert near.all()
        assert (np.asarray(one) == np.asarray(other)).mean() > 0.5


def test_an_average_follows_masters_on_the_host():
    specs, fresh, mesh = start(LoRAConfig(), jnp.bfloat16, False)
    optimizer, cfg = make_optimizer(ADAM, specs, 10), EMAConfig(enable=True, decay=0.5)
    with jax.set_mesh(mesh):
        averages = []
        for create in (create_state, create_offloaded):
            ema = start_ema(create(fresh(0), optimizer))
            averages.append(ema_program(cfg)(ema, create(fresh(1), optimizer)).weights)
        for one, other in zip(*map(jax.tree.leaves, averages), strict=True):
            assert not is_on_host(other)
            np.testing.assert_array_equal(one, other)


def test_like_layers_share_a_piece_of_program():
    specs, _, _ = start(LoRAConfig(), jnp.bfloat16, False)
    optimizer = make_optimizer(ADAM, specs, 10)
    found = list(pieces(specs, optimizer.rules))
    covered = sorted(number for piece in found for number in piece.numbers)
    assert covered == list(range(len(optimizer.rules)))
    layers = [piece for piece in found if len(piece.numbers) > 1]
    assert len(layers) == CFG.num_layers
    assert len({piece.rules for piece in layers}) == 1
