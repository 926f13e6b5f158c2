"""AdamW's groups, schedules and clipping against closed forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.engine.optimizer import (
    OptimizerConfig,
    learning_rate_schedule,
    learning_rates,
    make_optimizer,
    rate_metrics,
)
from tests.engine import toy


def rates(steps: list[int], num_steps: int, **settings) -> list[float]:
    schedule: Any = learning_rate_schedule(OptimizerConfig(**settings), num_steps)
    return [float(schedule(step)) for step in steps]


def test_a_constant_rate_is_constant():
    assert rates([0, 5, 99, 200], 100, learning_rate=0.5, schedule="constant") == [0.5] * 4


def test_a_linear_rate_falls_to_its_final_fraction_at_the_last_step():
    got = rates([0, 25, 100, 150], 100, learning_rate=0.4, schedule="linear", final_fraction=0.1)
    np.testing.assert_allclose(got, [0.4, 0.31, 0.04, 0.04], rtol=1e-6)


def test_a_cosine_rate_is_half_a_wave():
    got = rates([0, 25, 50, 100], 100, learning_rate=0.4, schedule="cosine", final_fraction=0.1)
    wave = [0.5 * (1 + np.cos(np.pi * t)) for t in (0, 0.25, 0.5, 1)]
    np.testing.assert_allclose(got, [0.4 * (0.9 * w + 0.1) for w in wave], rtol=1e-6)


@pytest.mark.parametrize("num_cycles", [1, 2, 3])
def test_a_cosine_with_restarts_starts_at_the_full_rate_in_every_cycle(num_cycles):
    """transformers' `get_cosine_with_hard_restarts_schedule_with_warmup`, on its own progress."""
    steps = list(range(0, 130, 3))
    got = rates(
        steps, 120, learning_rate=0.4, schedule="cosine_with_restarts", num_cycles=num_cycles
    )
    done = np.array(steps) / 120
    wave = 0.5 * (1 + np.cos(np.pi * (num_cycles * done % 1.0)))
    np.testing.assert_allclose(got, 0.4 * np.where(done < 1, wave, 0), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_polynomial_rate_ends_at_its_final_fraction(power):
    """transformers' `get_polynomial_decay_schedule_with_warmup`; its end, 1e-7, is absolute."""
    steps = [0, 10, 50, 99, 100, 150]
    got = rates(
        steps, 100, learning_rate=1e-3, schedule="polynomial", power=power, final_fraction=1e-4
    )
    left = np.maximum(1 - np.array(steps) / 100, 0)
    np.testing.assert_allclose(got, (1e-3 - 1e-7) * left**power + 1e-7, rtol=1e-4)


SHAPES = {
    "constant": (1, 1),
    "linear": (0.5, 0),
    "cosine": (0.5, 0),
    "cosine_with_restarts": (0.5, 0),
    "polynomial": (0.5, 0),
}
"""The share of the rate half way and at the end."""


@pytest.mark.parametrize("schedule", SHAPES)
def test_warm_up_rises_to_the_rate_and_the_schedule_runs_over_the_rest(schedule):
    """The first step already has a rate, step `warmup_steps` the full one."""
    got = rates([0, 1, 3, 4, 8, 12], 12, learning_rate=0.8, schedule=schedule, warmup_steps=4)
    middle, last = SHAPES[schedule]
    expected = [0.2, 0.4, 0.8, 0.8, 0.8 * middle, 0.8 * last]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


def first_update(gradients: Any, **settings: Any) -> tuple[Any, Any, Any]:
    """Updates and state of one step at the toy parameters."""
    config = OptimizerConfig(**{"learning_rate": 0.1, "schedule": "constant"} | settings)
    optimizer = make_optimizer(config, toy.SPECS, 10)
    params = toy.parameters()
    updates, state = optimizer.update(gradients, optimizer.init(params), params)
    return params, updates, state


def test_matrices_decay_and_biases_do_not():
    """With no gradient only decay moves anything: by lr * wd * value."""
    zero = jax.tree.map(jnp.zeros_like, toy.parameters())
    params, updates, _ = first_update(zero, weight_decay=0.3)
    np.testing.assert_allclose(updates["weight"], -0.1 * 0.3 * params["weight"], rtol=1e-6)
    assert (updates["bias"] == 0).all()


def test_the_rates_that_are_shown_are_those_of_the_updates():
    """With no gradient an update is lr * wd * value: its size tells the rate of every step."""
    config = OptimizerConfig(0.1, schedule="cosine", warmup_steps=2, weight_decay=0.5)
    optimizer, params = make_optimizer(config, toy.SPECS, 6), toy.parameters()
    zero, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    rates = learning_rates(config, 6, adapter_rate=0.2)
    for step in range(6):
        updates, state = optimizer.update(zero, state, params)
        shown = rate_metrics(rates, jnp.int32(step), "policy/")
        decayed = -0.5 * shown["policy/lr"] * params["weight"]
        update = jnp.asarray(updates["weight"])  # pyright: ignore
        np.testing.assert_allclose(update, decayed, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(shown["policy/lr_adapters"], 2 * shown["policy/lr"], rtol=1e-5)


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_gradients_are_clipped_by_the_norm_of_all_together(size):
    """The first moment after one step is (1 - beta1) times the clipped gradient."""
    gradients = jax.tree.map(lambda p: size * p, toy.parameters(seed=3))
    norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
    _, _, state = first_update(gradients, clip_norm=2.0, beta1=0.9)
    first = optax.tree.get(state, "mu")
    for name, gradient in gradients.items():
        clipped = gradient * min(1.0, 2.0 / norm)
        np.testing.assert_allclose(first[name], 0.1 * clipped, rtol=1e-5)
    assert (norm > 2.0) == (size == 10.0)


def test_the_first_step_is_adams():
    """m / sqrt(v) with bias correction is the gradient's sign, but for eps."""
    gradients = toy.parameters(seed=3)
    _, updates, _ = first_update(gradients, eps=1e-3, clip_norm=1e9)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            updates[name], -0.1 * gradient / (np.abs(gradient) + 1e-3), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, "must not be negative"),
        ({"weight_decay": -0.1}, "must not be negative"),
        ({"beta2": 1.0}, r"beta1 and beta2 must lie in \[0, 1\)"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"learning_rate": 1e-3} | changes)
