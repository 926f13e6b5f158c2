"""Pretraining text in PPO's update: one optimizer step on the sum of both losses' gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.reshard import put_batch
from rlhf_jax.data.batches import TextBatch
from rlhf_jax.engine.ppo_step import UpdateSettings, ppo_update
from rlhf_jax.engine.state import create_state
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.objectives.experience import Experience
from tests.engine.drive import PROMPT_LENGTHS, Driver, P, prompts, to_numpy
from tests.models.cases import OPT

R, COEF = 4, 3.0
TEXT = np.random.default_rng(11).integers(3, 99, (8, P + R)).astype(np.int32)
VALID = np.array([1, 1, 1, 1, 1, 0, 1, 0], np.float32)
REAL = TEXT[VALID > 0]


def text() -> TextBatch:
    return TextBatch(TEXT, np.full(8, P + R, np.int32), np.zeros(8, np.int32), VALID)


def experience(seed: int = 5) -> Experience:
    """A hand-made one, in which the policy has moved a little."""
    rng, zeros = np.random.default_rng(seed), np.zeros((8, R), np.float32)
    lengths = np.array([4, 3, 1, 2, 4, 4, 2, 0], np.int32)
    arrays: dict[str, Any] = {
        "tokens_BT": rng.integers(3, 99, (8, P + R)).astype(np.int32),
        "prompt_lengths_B": PROMPT_LENGTHS, "response_lengths_B": lengths,
        "logprobs_BR": zeros - 5, "ref_logprobs_BR": zeros, "values_BR": zeros,
        "advantages_BR": rng.normal(size=(8, R)).astype(np.float32), "returns_BR": zeros + 1,
        "mask_BR": np.arange(R) < lengths[:, None], "scores_B": zeros[:, 0],
        "valid_B": prompts().valid_B,
    }  # fmt: skip
    return Experience(**arrays)


@functools.cache
def step_of(mesh: str, inference_tp: int, parts: int, *, mixed: bool) -> tuple[Any, Any, Any]:
    """Minus the gradients of actor and critic, as the change of one step of plain descent."""
    driver = Driver(OPT, mesh, inference_tp)
    settings = UpdateSettings(
        temperature=1.0, clip_range=0.2, value_clip_range=0.2, value_coef=0.1, entropy_coef=0.0,
        target_kl=None, num_parts=parts, remat="none", ptx_coef=COEF,
    )  # fmt: skip
    optimizers = (optax.sgd(1.0), optax.sgd(1.0))
    update = driver.jit(
        ppo_update, actor_place=driver.place, critic_place=driver.place, optimizers=optimizers,
        settings=settings,
    )  # fmt: skip
    layout = driver.engine.compute
    with jax.set_mesh(driver.engine.mesh):
        old = (
            create_state(driver.actor(1), optimizers[0]),
            create_state(driver.scalar(3), optimizers[1]),
        )
        ptx = put_batch(text(), layout) if mixed else None
        rows = put_batch(experience(), layout)
        actor, critic, _, metrics = update(*old, rows, np.arange(8), jnp.bool_(False), ptx)
    before, after = to_numpy(tuple(s.params for s in old)), to_numpy((actor.params, critic.params))
    moved = jax.tree.map(np.subtract, after, before)
    assert (actor.step, critic.step) == (1, 1)
    return *moved, to_numpy(metrics)


@functools.cache
def cross_entropy_and_gradient() -> tuple[np.ndarray, Any]:
    """Of the valid rows, from all logits at once."""
    driver = Driver(OPT)

    def loss(params: Any) -> jax.Array:
        hidden = forward(params, jnp.asarray(REAL), OPT, driver.engine.compute)
        logits = logits_from_hidden(params, hidden, OPT)[:, :-1, : OPT.vocab_size]
        chosen = jax.nn.one_hot(REAL[:, 1:], OPT.vocab_size) * jax.nn.log_softmax(logits)
        return -chosen.sum() / REAL[:, 1:].size

    return to_numpy(driver.jit(jax.value_and_grad(loss))(driver.actor(1)))


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), one, other)


def test_the_step_is_that_of_ppo_and_of_the_weighted_cross_entropy_together():
    mixed, critic, metrics = step_of("1x1", 1, 1, mixed=True)
    plain, critic_alone, plain_metrics = step_of("1x1", 1, 1, mixed=False)
    loss, gradient = cross_entropy_and_gradient()
    np.testing.assert_allclose(metrics["loss/ptx_avg"], loss, rtol=1e-5)
    assert_close(mixed, jax.tree.map(lambda step, g: step - COEF * g, plain, gradient))
    assert_close(critic, critic_alone)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-2
    assert metrics["policy/grad_norm"] > plain_metrics["policy/grad_norm"]
    for name in ("loss/policy_avg", "policy/approxkl_avg"):
        np.testing.assert_allclose(metrics[name], plain_metrics[name], rtol=1e-5)
    assert "loss/ptx_avg" not in plain_metrics


@pytest.mark.parametrize(("mesh", "inference_tp", "parts"), [("1x1", 1, 2), ("4x2", 2, 2)])
def test_neither_accumulation_nor_the_mesh_changes_it(mesh, inference_tp, parts):
    """Parts have different numbers of valid rows: they count by their tokens."""
    assert VALID[::2].sum() != VALID[1::2].sum()
    one, other = step_of("1x1", 1, 1, mixed=True), step_of(mesh, inference_tp, parts, mixed=True)
    assert_close(other[0], one[0])
    np.testing.assert_allclose(other[2]["loss/ptx_avg"], one[2]["loss/ptx_avg"], rtol=1e-5)
