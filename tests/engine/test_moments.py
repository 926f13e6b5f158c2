"""Moments in bfloat16: rounding is fair, and training with them is training."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.engine.moments import mixed, nth_seed, random_bits, round_stochastically
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import create_state
from rlhf_jax.engine.step import train_step
from tests.engine import toy

NARROW = OptimizerConfig(
    0.05, schedule="constant", beta2=0.99, moments_dtype="bfloat16", clip_norm=100.0
)


def test_rounding_goes_to_a_neighbour_and_its_mean_is_the_number():
    """4096 draws of each number: the mean lies within four standard errors of it."""
    rng = np.random.default_rng(0)
    numbers = (rng.normal(size=64) * np.logspace(-20, 20, 64)).astype(np.float32)
    drawn = np.asarray(
        round_stochastically(jnp.tile(numbers, (4096, 1)), jnp.uint32(1)), np.float64
    )
    bits = numbers.view(np.uint32)
    low = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    high = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    assert ((drawn == low) | (drawn == high)).all()
    share = (numbers - low) / (high - low)
    error = 4 * np.sqrt(share * (1 - share) / 4096)
    np.testing.assert_array_less(np.abs((drawn == high).mean(0) - share), error + 1e-12)


def test_what_bfloat16_holds_and_what_is_not_finite_stay():
    numbers = np.array([0.0, -0.0, 1.0, -3.5, np.inf, -np.inf, 2.0**-126], np.float32)
    found = round_stochastically(jnp.asarray(numbers), jnp.uint32(0))
    np.testing.assert_array_equal(np.asarray(found, np.float32), numbers)
    assert np.isnan(round_stochastically(jnp.float32([np.nan]), jnp.uint32(0))).all()


def test_bits_are_even_and_independent_of_neighbours_seeds_and_steps():
    """Of 2^16 places: each of the bits that rounding uses is set in half of them, and agrees in
    half of them with that of the next place, the next row, the seeds beside it and the next step.
    """
    x = jnp.zeros((256, 256))
    seed = mixed(jnp.uint32(5))
    bits = np.asarray(random_bits(x, nth_seed(seed, 2)))
    seeds = nth_seed(seed, 1), nth_seed(seed, 3), nth_seed(mixed(jnp.uint32(6)), 2)
    others = [np.asarray(random_bits(x, other)) for other in seeds]
    others += [np.roll(bits, 1, axis) for axis in (0, 1)] + [np.zeros_like(bits)]
    assert len(np.unique(bits)) > 65000
    for other in others:
        agree = [(((bits ^ other) >> bit) & 1).mean() for bit in range(16, 32)]
        np.testing.assert_allclose(agree, 0.5, atol=4.5 * 0.5 / 256)


@pytest.mark.parametrize("mesh_name", ["8x1", "2x4"])
def test_a_mesh_changes_no_draw(mesh_name):
    mesh = make_mesh(parse_mesh(mesh_name), 1 if mesh_name == "8x1" else 4)
    layout = Layout.create(mesh, "store", {"mlp": 16})
    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    run = jax.jit(partial(round_stochastically, seed=jnp.uint32(3)))
    alone = run(x)
    with jax.set_mesh(mesh):
        found = run(jax.device_put(x, layout.sharding("mlp", None)))
    assert found.sharding.spec == layout.spec("mlp", None)
    np.testing.assert_array_equal(found, alone)


def train(cfg: OptimizerConfig, steps: int) -> list[float]:
    """Losses of the toy model on batches that repeat."""
    optimizer = make_optimizer(cfg, toy.SPECS, steps)
    state = create_state(toy.parameters(), optimizer)
    step: Any = jax.jit(
        partial(
            train_step, loss_fn=toy.loss_fn, weight_fn=toy.num_tokens, optimizer=optimizer,
            num_parts=1,
        )
    )  # fmt: skip
    losses = []
    for number in range(steps):
        state, metrics = step(state, toy.rows(16, seed=number % 4))
        losses.append(float(metrics["loss"]))
    narrow = {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
    assert narrow == {np.dtype(cfg.moments_dtype)}
    return losses


@pytest.mark.parametrize("optim", ["adamw", "lion"])
def test_training_is_that_with_float32_moments(optim):
    """The loss of the last quarter, in units of what training gained."""
    cfg = replace(NARROW, optim=optim, learning_rate=0.05 if optim == "adamw" else 0.01)
    wide = train(replace(cfg, moments_dtype="float32"), 120)
    narrow = train(cfg, 120)
    gained = np.mean(wide[:4]) - np.mean(wide[-30:])
    assert gained > 1
    assert abs(np.mean(narrow[-30:]) - np.mean(wide[-30:])) < 0.03 * gained
    assert narrow != wide
    assert train(cfg, 120) == narrow


def test_a_steady_gradient_fills_the_second_moment():
    """Rounded to the nearest it would stop growing at half of (1 - beta2) g² over the spacing."""
    specs, grads = toy.SPECS, jax.tree.map(jnp.ones_like, toy.parameters())
    cfg = replace(NARROW, beta2=0.999)
    optimizer = make_optimizer(cfg, specs, 10)
    state = optimizer.init(toy.parameters())
    update = jax.jit(optimizer.update)
    for _ in range(3000):
        _, state = update(grads, state, toy.parameters())
    found = optax.tree.get(state, "nu")
    mean = np.mean([np.asarray(leaf, np.float64).mean() for leaf in jax.tree.leaves(found)])
    assert mean == pytest.approx(1 - 0.999**3000, abs=0.03)
    nearest = jnp.bfloat16(0)
    for _ in range(3000):
        nearest = jnp.bfloat16(0.999 * nearest.astype(jnp.float32) + 0.001)
    assert nearest < 0.5


def test_adafactor_has_no_moments_to_round():
    with pytest.raises(ValueError, match="moments_dtype=bfloat16: adafactor keeps a row"):
        OptimizerConfig(1e-3, optim="adafactor", moments_dtype="bfloat16")


@pytest.mark.parametrize(("optim", "rate"), [("adafactor", 0.05), ("lion", 0.01)])
def test_other_rules_learn(optim, rate):
    losses = train(replace(NARROW, optim=optim, learning_rate=rate, moments_dtype="float32"), 120)
    assert np.mean(losses[-30:]) < np.mean(losses[:4]) - 1
