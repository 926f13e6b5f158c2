"""The moving average of the actor against its recurrence in float64, and why it is float32."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.engine.ema import EMAConfig, average_params, ema_program, start_ema
from rlhf_jax.engine.state import TrainState, create_state
from tests.engine.drive import Driver
from tests.engine.toy import parameters
from tests.models.cases import OPT

STEPS = 7


def state_of(weights: Any, dtype: Any = jnp.float32) -> TrainState:
    """A state whose master, or float32 working copy, is `weights`."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights)
    state = create_state(params, optax.sgd(1.0))
    if dtype == jnp.float32:
        return state
    return replace(state, master=jax.tree.map(jnp.asarray, weights))


def recurrence(weights: list[np.ndarray], cfg: EMAConfig) -> list[np.ndarray]:
    """The average after each update, from the definition; `weights[0]` is before the first."""
    averages = [weights[0].astype(np.float64)]
    for n, new in enumerate(weights[1:], start=1):
        old = averages[-1]
        if n <= cfg.start:
            averages.append(new.astype(np.float64))
        elif n % cfg.interval == 0:
            averages.append(cfg.decay * old + (1 - cfg.decay) * new)
        else:
            averages.append(old)
    return averages


@pytest.mark.parametrize(
    "cfg",
    [
        EMAConfig(),
        EMAConfig(decay=0.5, start=3),
        EMAConfig(decay=0.9, interval=2),
        EMAConfig(decay=0.9, start=2, interval=3),
        EMAConfig(decay=0.0),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_average_follows_its_recurrence_over_the_float32_weights(cfg, dtype):
    history = [parameters(seed=n) for n in range(STEPS + 1)]
    ema, average = start_ema(state_of(history[0], dtype)), ema_program(cfg)
    truths = {name: recurrence([np.asarray(w[name]) for w in history], cfg) for name in history[0]}
    for n in range(1, STEPS + 1):
        ema = average(ema, state_of(history[n], dtype))
        for name, truth in truths.items():
            assert ema.weights[name].dtype == jnp.float32
            np.testing.assert_allclose(ema.weights[name], truth[n], rtol=1e-5, atol=1e-6)
    assert ema.count == STEPS


def test_an_update_without_a_step_is_none():
    cfg, weights = EMAConfig(decay=0.5, start=1), [parameters(seed=n) for n in range(3)]
    ema, average = start_ema(state_of(weights[0])), ema_program(cfg)
    ema = average(ema, state_of(weights[1]), jnp.bool_(False))
    assert ema.count == 0
    jax.tree.map(np.testing.assert_array_equal, ema.weights, weights[0])
    ema = average(ema, state_of(weights[1]), jnp.bool_(True))  # the first, which it follows
    ema = average(ema, state_of(weights[2]), jnp.bool_(False))
    assert ema.count == 1
    jax.tree.map(np.testing.assert_array_equal, ema.weights, weights[1])


def test_updates_that_16_bits_would_lose_arrive():
    """Weights of 1 that rise by 1e-3 an update: 0.8 % of that is far below bfloat16's 2⁻⁷."""
    cfg, steps = EMAConfig(), 100
    rising = [np.full(4, 1 + 1e-3 * n, np.float32) for n in range(steps + 1)]
    ema, average = start_ema(state_of({"w": rising[0]}, jnp.bfloat16)), ema_program(cfg)
    coarse = jnp.ones(4, jnp.bfloat16)
    for weights in rising[1:]:
        ema = average(ema, state_of({"w": weights}, jnp.bfloat16))
        coarse = coarse * jnp.bfloat16(cfg.decay) + jnp.bfloat16(1 - cfg.decay) * weights.astype(
            jnp.bfloat16
        )
    truth = recurrence(rising, cfg)[-1]
    np.testing.assert_allclose(ema.weights["w"], truth, rtol=1e-6)
    assert np.abs(np.asarray(coarse, np.float32) - truth).min() > 0.2 * (truth - 1).max()


def test_the_average_owns_its_buffers_and_gives_them_to_the_next():
    """The update donates the actor's buffers: the average must not be among them."""
    state = state_of(parameters())
    ema = start_ema(state)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)}
    assert not pointers & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(ema.weights)}
    ema_program(EMAConfig())(ema, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(ema.weights))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_lives_where_the_actor_does_and_evaluates_in_its_dtype(dtype):
    driver = Driver(OPT, "4x2", 2, dtype=dtype)
    with jax.set_mesh(driver.engine.mesh):
        state = create_state(driver.actor(1), optax.sgd(1.0))
        ema = ema_program(EMAConfig())(start_ema(state), state)
        params = average_params(ema, state)
    for mine, averaged, theirs in zip(
        *map(jax.tree.leaves, (params, ema.weights, state.params)), strict=True
    ):
        assert averaged.sharding.is_equivalent_to(theirs.sharding, theirs.ndim)
        assert (mine.dtype, mine.sharding) == (theirs.dtype, averaged.sharding)
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"decay": 1.0}, r"ema.decay must lie in \[0, 1\), got 1.0"),
        ({"start": -1}, "ema.start must be at least 0 .* got -1"),
        ({"interval": 0}, "ema.interval at least 1, got 0 and 0"),
    ],
)
def test_settings_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        EMAConfig(**kwargs)
