"""The same values on every mesh: logits, generated tokens, and one whole PPO step in float32."""

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.reshard import put_batch, put_rows
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.ppo_step import (
    Scorers,
    ScoringSettings,
    UpdateSettings,
    ppo_update,
    score_rollout,
)
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.models.decoder import forward, gather_outer
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import param_specs, scalar_specs
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.objectives.experience import Experience, RewardSettings
from tests.engine.drive import PROMPT_LENGTHS, Driver, P, prompts, to_numpy
from tests.models.cases import LLAMA, OPT

R = 5
TRAINING = [("8x1", 1), ("8x1", 4), ("4x2", 4), ("2x4", 4), ("1x8", 8), ("2x2x2", 2)]
"""Meshes and inference TP that differ in how training is laid out; 1x1 is the truth."""
GENERATION = [*TRAINING, ("8x1", 2), ("8x1", 8), ("4x2", 2), ("4x2", 8), ("2x4", 8)]
STOPS = tuple(range(3, 15))

# A step whose size follows the gradient: Adam's own is near its sign, and would turn rounding
# errors of gradients that are zero (key biases) into whole steps.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.1, schedule="constant", weight_decay=0.1, eps=1e-2, clip_norm=0.5
)
SCORING = ScoringSettings(
    reward=RewardSettings(), temperature=0.7, score_mean=0.3, score_std=2.0,
    recompute_logprobs=False,
)  # fmt: skip
UPDATE = UpdateSettings(
    temperature=0.7, clip_range=0.2, value_clip_range=0.2, value_coef=0.1, entropy_coef=0.01,
    target_kl=None, num_parts=1, remat="full",
)  # fmt: skip


def fixed_rollout() -> Rollout:
    """Answers of several lengths with log-probabilities near, and not at, the policy's."""
    rng = np.random.default_rng(7)
    lengths = np.array([5, 4, 1, 3, 5, 2, 5, 0], np.int32)
    inside = np.arange(R) < lengths[:, None]
    arrays: dict[str, Any] = {
        "tokens_BR": np.where(inside, rng.integers(3, 120, (8, R)), 0).astype(np.int32),
        "logprobs_BR": np.where(inside, rng.normal(-6.5, 0.5, (8, R)), 0).astype(np.float32),
        "lengths_B": lengths,
        "ended_B": np.array([0, 1, 1, 1, 0, 1, 1, 0], bool),
    }
    return Rollout(**arrays)


@dataclass(frozen=True)
class Results:
    """All that training computes on one layout, on the host."""

    logits_BTV: np.ndarray
    experience: Experience
    metrics: dict[str, np.ndarray]
    actor: TrainState
    critic: TrainState
    losses: dict[str, np.ndarray]
    donated: bool


@functools.cache
def train_on(mesh: str, inference_tp: int, dtype: Any = np.float32) -> Results:
    """Logits, scores and one update on a mesh."""
    driver = Driver(OPT, mesh, inference_tp, dtype=dtype)
    place, compute = driver.place, driver.engine.compute
    optimizers: Any = tuple(
        make_optimizer(OPTIMIZER, specs(OPT), 10) for specs in (param_specs, scalar_specs)
    )
    score = driver.jit(score_rollout, actor=place, critic=place, settings=SCORING)
    update = jax.jit(
        partial(
            ppo_update, actor_place=place, critic_place=place, optimizers=optimizers,
            settings=UPDATE,
        ),
        donate_argnums=(0, 1),
    )  # fmt: skip

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        hidden = forward(params, tokens, OPT, place.layout)
        return logits_from_hidden(gather_outer(params, OPT, place.layout), hidden, OPT)

    scorers = Scorers(driver.actor(1), driver.actor(2), driver.scalar(3), driver.scalar(4))
    with jax.set_mesh(driver.engine.mesh):
        rows = put_batch(prompts(), compute)
        answers = put_batch(fixed_rollout(), driver.engine.rollout)
        experience, _, metrics = score(scorers, rows, answers, None, Control())
        out = driver.jit(logits)(scorers.actor, experience.tokens_BT)
        models = (scorers.actor, scorers.critic)
        old = [create_state(*pair) for pair in zip(models, optimizers, strict=True)]
        actor, critic, _, losses = update(
            *old, experience, put_rows(np.arange(8)[::-1], compute, None), jnp.bool_(False)
        )
    donated = all(leaf.is_deleted() for leaf in jax.tree.leaves([s.params for s in old]))
    return Results(*to_numpy((out, experience, metrics, actor, critic, losses)), donated)


@pytest.fixture(scope="module", params=TRAINING, ids=lambda p: f"{p[0]}-tp{p[1]}")
def trained(request) -> Results:
    return train_on(*request.param)


@pytest.fixture(scope="module")
def truth() -> Results:
    return train_on("1x1", 1)


def assert_close(one: Any, other: Any, rtol: float, atol: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


def test_logits_are_equal(trained, truth, tolerance):
    np.testing.assert_allclose(trained.logits_BTV, truth.logits_BTV, **tolerance(np.float32))


def test_experience_and_metrics_of_a_rollout_are_equal(trained, truth, tolerance):
    assert_close(trained.experience, truth.experience, **tolerance(np.float32))
    assert_close(trained.metrics, truth.metrics, **tolerance(np.float32))


def test_one_update_gives_equal_models_and_moments(trained, truth):
    """Absolute within 1e-6 where parameters move by 1e-2 to 1e-1."""
    assert_close(trained.losses, truth.losses, rtol=1e-4, atol=1e-6)
    assert_close(trained.actor, truth.actor, rtol=1e-5, atol=1e-6)
    assert_close(trained.critic, truth.critic, rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_are_their_rounded_masters_and_near_the_float32_update(truth):
    """Values are of order 0.1 to 1, and each keeps 8 bits on the way."""
    mixed = train_on("4x2", 4, jnp.bfloat16)
    for state, expected in ((mixed.actor, truth.actor), (mixed.critic, truth.critic)):
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.master)
        jax.tree.map(np.testing.assert_array_equal, state.params, rounded)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.master)} == {np.dtype(np.float32)}
        assert_close(state.master, expected.params, rtol=0, atol=2e-2)
    for name in ("loss/policy_avg", "loss/value_avg", "policy/entropy_avg", "critic/grad_norm"):
        np.testing.assert_allclose(mixed.losses[name], truth.losses[name], rtol=5e-2)


def test_the_update_under_test_does_something(truth):
    """Ratios are clipped in part, gradients are clipped, all matrices move."""
    assert 0.1 < truth.losses["policy/clipfrac_avg"] < 0.9
    assert truth.losses["val/ratio_var"] > 1e-3
    assert truth.losses["policy/grad_norm"] > OPTIMIZER.clip_norm
    assert truth.actor.step == truth.critic.step == 1
    before = to_numpy(Driver(OPT).actor(1))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, truth.actor.params)
    assert min(jax.tree.leaves(moved.layers)) > 1e-6
    assert moved.layers[0].qkv_ED > 1e-3


def test_the_old_models_buffers_are_given_to_the_new(trained):
    assert trained.donated


def test_padding_of_vocabulary_and_mlp_stays_zero(trained):
    """No gradient, no moment, no decay reaches it."""
    for state, body in ((trained.actor, lambda t: t), (trained.critic, lambda t: t.body)):
        moments = (optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))
        for tree in (body(state.params), *map(body, moments)):
            assert np.abs(tree.embed_VW[: OPT.vocab_size]).max() > 0
            assert (tree.embed_VW[OPT.vocab_size :] == 0).all()
            layer = tree.layers[0]
            for leaf in (layer.up_FD, layer.up_bias_F, layer.down_FD):
                assert (leaf[OPT.mlp_width :] == 0).all()


@functools.cache
def generate_on(
    mesh: str, inference_tp: int, temperature: float = 1.0, model: Any = OPT
) -> Rollout:
    sampling = SamplingConfig(max_new_tokens=8, temperature=temperature)
    return Driver(model, mesh, inference_tp, STOPS).generate(sampling)


def assert_same_answers(got: Rollout, expected: Rollout) -> None:
    np.testing.assert_array_equal(got.tokens_BR, expected.tokens_BR)
    np.testing.assert_array_equal(got.lengths_B, expected.lengths_B)
    np.testing.assert_array_equal(got.ended_B, expected.ended_B)
    np.testing.assert_allclose(got.logprobs_BR, expected.logprobs_BR, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mesh", "inference_tp"), GENERATION)
def test_sampled_answers_are_equal(mesh, inference_tp):
    assert_same_answers(generate_on(mesh, inference_tp), generate_on("1x1", 1))


@pytest.mark.parametrize(("mesh", "inference_tp"), [("4x2", 4), ("1x8", 8)])
def test_greedy_answers_are_equal(mesh, inference_tp):
    assert_same_answers(generate_on(mesh, inference_tp, 0.0), generate_on("1x1", 1, 0.0))


def test_heads_that_do_not_divide_give_equal_answers():
    """3 KV heads on 2-way tensor parallelism: attention replicated, feed-forward cut."""
    model = replace(LLAMA, num_layers=1)
    assert_same_answers(generate_on("4x2", 2, 1.0, model), generate_on("1x1", 1, 1.0, model))


def test_the_answers_under_test_differ_in_length_and_from_greedy():
    sampled, greedy = generate_on("1x1", 1), generate_on("1x1", 1, 0.0)
    assert len(set(sampled.lengths_B)) > 3
    assert (sampled.tokens_BR != greedy.tokens_BR).any()
    assert PROMPT_LENGTHS.max() + fixed_rollout().lengths_B.max() <= P + R
