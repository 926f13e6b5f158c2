"""Scoring a rollout and updating on it: which positions are read, and when nothing is changed."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.reshard import put_batch
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.ppo_step import (
    Scorers,
    ScoringSettings,
    UpdateSettings,
    actor_loss,
    num_actions,
    ppo_update,
    score_rollout,
)
from rlhf_jax.engine.row_passes import join_rows, row_scores
from rlhf_jax.engine.state import TrainState, create_state, kept_state, schedule_step
from rlhf_jax.engine.step import gradients
from rlhf_jax.models.decoder import Remat, forward
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import param_specs, scalar_specs
from rlhf_jax.objectives.adaptive import AdaptiveKL, Control, Moments
from rlhf_jax.objectives.experience import Experience, RewardSettings
from tests.engine.drive import PROMPT_LENGTHS, Driver, P, prompts, to_numpy
from tests.models.cases import LLAMA, OPT

R, TEMPERATURE = 4, 0.7
GATED = replace(LLAMA, num_layers=1)
SCORING = ScoringSettings(
    reward=RewardSettings(), temperature=TEMPERATURE, score_mean=0.3, score_std=2.0,
    recompute_logprobs=True,
)  # fmt: skip
UPDATE = UpdateSettings(
    temperature=TEMPERATURE, clip_range=0.2, value_clip_range=0.2, value_coef=0.1,
    entropy_coef=0.01, target_kl=0.1, num_parts=1, remat="none",
)  # fmt: skip
LENGTHS = np.array([4, 3, 1, 2, 4, 4, 2, 0], np.int32)
ENDED = np.array([1, 1, 1, 1, 0, 0, 1, 0], bool)


def rollout() -> Rollout:
    rng = np.random.default_rng(3)
    inside = np.arange(R) < LENGTHS[:, None]
    arrays: dict[str, Any] = {
        "tokens_BR": np.where(inside, rng.integers(3, 99, (8, R)), 0).astype(np.int32),
        "logprobs_BR": np.where(inside, -1.25, 0).astype(np.float32),
        "lengths_B": LENGTHS,
        "ended_B": ENDED,
    }
    return Rollout(**arrays)


def joined() -> np.ndarray:
    """Prompt and answer of every row, by hand."""
    rows, batch, answers = np.zeros((8, P + R), np.int32), prompts(), rollout().tokens_BR
    for row, prompt, n, answer in zip(rows, batch.tokens_BP, batch.lengths_B, answers, strict=True):
        row[:P] = prompt
        row[n : n + R] = answer
    return rows


@pytest.mark.parametrize(("mesh", "inference_tp"), [("1x1", 1), ("4x2", 2)])
def test_an_answer_starts_where_its_prompt_ends(mesh, inference_tp):
    driver = Driver(OPT, mesh, inference_tp)
    layout = driver.engine.compute
    batch = put_batch((prompts().tokens_BP, PROMPT_LENGTHS, rollout().tokens_BR), layout)
    np.testing.assert_array_equal(driver.jit(join_rows, layout=layout)(*batch), joined())


@functools.cache
def scored(settings: ScoringSettings) -> tuple[Experience, dict[str, Any]]:
    driver = Driver(OPT)
    score = driver.jit(score_rollout, actor=driver.place, critic=driver.place, settings=settings)
    models = Scorers(driver.actor(1), driver.actor(2), driver.scalar(3), driver.scalar(4))
    experience, _, metrics = to_numpy(score(models, prompts(), rollout(), None, Control()))
    return experience, metrics


@functools.cache
def by_hand() -> dict[str, np.ndarray]:
    """What each model says at every position of the joined rows."""
    driver, tokens = Driver(OPT), joined()

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        return logits_from_hidden(params, forward(params, tokens, OPT, driver.engine.compute), OPT)

    read, scores = driver.jit(logits), driver.jit(row_scores, place=driver.place)
    out = {
        "logprobs": read(driver.actor(1), tokens),
        "ref_logprobs": read(driver.actor(2), tokens),
        "values": scores(driver.scalar(3), tokens),
        "rewards": scores(driver.scalar(4), tokens),
    }
    return {name: np.asarray(value, np.float64) for name, value in out.items()}


def test_log_probabilities_and_values_are_read_where_they_predict_the_token(tolerance):
    """Answer token r of a row is read at position prompt length - 1 + r."""
    experience, _ = scored(SCORING)
    truth = by_hand()
    for b, n in enumerate(PROMPT_LENGTHS):
        for r in range(LENGTHS[b]):
            np.testing.assert_allclose(
                experience.values_BR[b, r], truth["values"][b, n - 1 + r], **tolerance(np.float32)
            )
            for name in ("logprobs", "ref_logprobs"):
                z = truth[name][b, n - 1 + r, : OPT.vocab_size] / TEMPERATURE
                expected = z[joined()[b, n + r]] - np.log(np.exp(z).sum())
                got = getattr(experience, f"{name}_BR")[b, r]
                np.testing.assert_allclose(got, expected, **tolerance(np.float32))


def test_a_threshold_weights_actions_by_training_over_rollout(tolerance):
    """The rest of the experience stays as it is without."""
    plain, plain_metrics = scored(SCORING)
    experience, metrics = scored(replace(SCORING, rollout_is_threshold=0.03))
    assert plain.weights_BR is None
    inside = np.arange(R) < LENGTHS[:, None]
    ratio = np.exp(experience.logprobs_BR - rollout().logprobs_BR)
    expected = np.where(inside, np.minimum(ratio, 0.03), 1)
    np.testing.assert_allclose(np.asarray(experience.weights_BR), expected, **tolerance(np.float32))
    cut = (ratio > 0.03)[inside].mean()
    assert 0 < cut < 1
    np.testing.assert_allclose(metrics["rollout/is_truncated"], cut, rtol=1e-6)
    leaves = [jax.tree.leaves(e) for e in (replace(experience, weights_BR=None), plain)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert metrics.keys() - plain_metrics.keys() == {
        "rollout/is_weight_mean", "rollout/is_truncated",
    }  # fmt: skip


@pytest.mark.parametrize("train_eos", [True, False])
def test_the_reward_is_read_at_the_last_token_or_before_an_untrained_stop(train_eos, tolerance):
    reward = RewardSettings(train_eos=train_eos)
    experience, _ = scored(replace(SCORING, reward=reward, recompute_logprobs=train_eos))
    last = PROMPT_LENGTHS + LENGTHS - 1 - (0 if train_eos else ENDED)
    raw = by_hand()["rewards"][np.arange(8), last]
    expected = (raw - SCORING.score_mean) / SCORING.score_std
    np.testing.assert_allclose(experience.scores_B[:-1], expected[:-1], **tolerance(np.float32))
    trained = LENGTHS - (0 if train_eos else ENDED)
    np.testing.assert_array_equal(experience.mask_BR.sum(1), np.where(np.arange(8) < 7, trained, 0))


EXTRA = np.linspace(-1, 2, 8, dtype=np.float32)
ONCE = replace(SCORING, recompute_logprobs=False)


def score_with(
    settings: ScoringSettings, extra: Any, *controls: Control, reward: bool = True
) -> list[tuple[Experience, Control, dict[str, Any]]]:
    """The same rollout scored with each control in turn, by one compiled program."""
    driver = Driver(OPT)
    score: Any = jax.jit(
        partial(score_rollout, actor=driver.place, critic=driver.place, settings=settings)
    )
    model = driver.scalar(4) if reward else None
    models = Scorers(driver.actor(1), driver.actor(2), driver.scalar(3), model)
    with jax.set_mesh(driver.engine.mesh):
        results = [
            to_numpy(score(models, prompts(), rollout(), extra, control)) for control in controls
        ]
    assert score._cache_size() == 1
    return results


def test_scores_from_outside_add_to_the_weighted_reward_model_or_stand_alone(tolerance):
    weighted = replace(ONCE, reward_model_weight=0.25)
    ((both, _, _),) = score_with(weighted, EXTRA, Control())
    raw = by_hand()["rewards"][np.arange(8), PROMPT_LENGTHS + LENGTHS - 1]
    expected = 0.25 * (raw - SCORING.score_mean) / SCORING.score_std + EXTRA
    np.testing.assert_allclose(both.scores_B[:-1], expected[:-1], **tolerance(np.float32))
    ((alone, _, metrics),) = score_with(ONCE, EXTRA, Control(), reward=False)
    np.testing.assert_array_equal(alone.scores_B, EXTRA)
    assert metrics["objective/scores"] == pytest.approx(EXTRA[:-1].mean())


def test_an_adaptive_coefficient_weighs_this_batch_and_moves_for_the_next(tolerance):
    """Twice the coefficient, twice the penalty; a KL far above the target raises it by a fifth of
    the 7 answers in 70. The program is compiled once.
    """
    adaptive = replace(ONCE, adaptive_kl=AdaptiveKL(target=1e-3, horizon=70))
    controls = [Control(kl_coef=jnp.float32(coef)) for coef in (0.1, 0.2)]
    once, twice = score_with(adaptive, None, *controls)
    ((fixed, _, plain),) = score_with(ONCE, None, Control())
    kl = plain["objective/kl"]
    assert kl > 0.1
    for (_, control, metrics), coef in zip((once, twice), (0.1, 0.2), strict=True):
        assert metrics["objective/kl_coef"] == np.float32(coef)
        np.testing.assert_allclose(metrics["objective/non_score_reward"], -coef * kl, rtol=1e-5)
        assert control.kl_coef == pytest.approx(coef * (1 + 0.2 * 7 / 70), rel=1e-6)
    np.testing.assert_allclose(once[0].returns_BR, fixed.returns_BR, **tolerance(np.float32))
    assert "objective/kl_coef" not in plain


def test_running_moments_scale_what_is_rewarded_and_not_what_is_reported(tolerance):
    """Answers of one token: their return is the score, less the KL of that token."""
    free = replace(ONCE, reward=RewardSettings(kl_coef=0.0, lam=1.0), center_scores=True)
    zero = jnp.float32(0)
    ((scaled, control, metrics),) = score_with(
        free, 100 * EXTRA, Control(moments=Moments(zero, zero, zero)), reward=False
    )
    real = 100 * EXTRA[:-1].astype(np.float64)
    assert control.moments is not None
    assert control.moments.count == 7
    np.testing.assert_allclose(control.moments.mean, real.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["objective/scores"], real.mean(), rtol=1e-5)
    expected = (real - real.mean()) / real.std()
    np.testing.assert_allclose(scaled.returns_BR[:-1, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_rollouts_own_log_probabilities_are_kept_unless_they_are_recomputed():
    experience, _ = scored(
        replace(SCORING, reward=RewardSettings(train_eos=False), recompute_logprobs=False)
    )
    np.testing.assert_array_equal(experience.logprobs_BR, rollout().logprobs_BR)


@functools.cache
def updater() -> Any:
    """`update(experience, stopped) -> (old actor, actor, old critic, critic, stopped, metrics)`."""
    driver = Driver(OPT)
    config = OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.1)
    optimizers: Any = tuple(make_optimizer(config, s(OPT), 10) for s in (param_specs, scalar_specs))
    program = driver.jit(
        ppo_update, actor_place=driver.place, critic_place=driver.place, optimizers=optimizers,
        settings=UPDATE,
    )  # fmt: skip

    def update(experience: Experience, *, rows: Any = range(8), stopped: bool = False) -> Any:
        old = (
            create_state(driver.actor(1), optimizers[0]),
            create_state(driver.scalar(3), optimizers[1]),
        )
        actor, critic, stopped, metrics = to_numpy(
            program(*old, experience, np.array(rows, np.int32), jnp.bool_(stopped))
        )
        return to_numpy(old[0]), actor, to_numpy(old[1]), critic, stopped, metrics

    return update


def same(one: Any, other: Any) -> bool:
    equal = jax.tree.map(
        np.array_equal, (one.params, one.opt_state), (other.params, other.opt_state)
    )
    return all(jax.tree.leaves(equal))


def test_the_first_update_starts_from_the_policy_that_sampled():
    """With recomputed log-probabilities its ratio is 1; both models take a step."""
    old_actor, actor, old_critic, critic, stopped, metrics = updater()(scored(SCORING)[0])
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/abs_log_ratio"] < 1e-5
    assert not stopped
    assert (actor.step, critic.step, metrics["val/skipped"]) == (1, 1, 0)
    assert not same(actor, old_actor)
    assert not same(critic, old_critic)


def test_the_order_of_rows_in_a_minibatch_does_not_matter(tolerance):
    experience, _ = scored(SCORING)
    one, other = (updater()(experience, rows=r)[-1] for r in (range(8), [3, 1, 0, 2, 7, 5, 6, 4]))
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("field", ["advantages_BR", "returns_BR"])
def test_actor_and_critic_skip_together_where_either_is_not_finite(field):
    """Advantages reach the actor alone, returns the critic alone."""
    experience, _ = scored(SCORING)
    array = getattr(experience, field).copy()
    array[0, 0] = np.nan
    poisoned = replace(experience, **{field: array})
    old_actor, actor, old_critic, critic, _, metrics = updater()(poisoned)
    assert np.isfinite(metrics["policy/grad_norm"]) == (field == "returns_BR")
    assert np.isfinite(metrics["critic/grad_norm"]) == (field == "advantages_BR")
    assert same(actor, old_actor)
    assert same(critic, old_critic)
    assert metrics["val/skipped"] == 1
    assert (actor.skipped, critic.skipped, actor.step, critic.step) == (1, 1, 0, 0)


def test_what_a_mask_leaves_out_may_be_anything():
    experience, _ = scored(SCORING)
    outside = ~experience.mask_BR
    wild = replace(experience, advantages_BR=np.where(outside, 1e9, experience.advantages_BR))
    _, actor, _, _, _, metrics = updater()(wild)
    _, expected, _, _, _, _ = updater()(experience)
    assert metrics["val/skipped"] == 0
    assert same(actor, expected)


def rate_put_back(new: TrainState, old: TrainState) -> TrainState:
    """`new` with the place in the schedule that `old` has."""
    parts = kept_state(old.opt_state, new.opt_state, jnp.bool_(False), jnp.bool_(True))
    return replace(new, opt_state=parts)


def test_a_policy_too_far_from_its_rollout_stops_both_for_the_rest_of_the_phase():
    """Log-probabilities off by 1 are a KL estimate of 0.5 where 0.1 is allowed. The learning rate
    alone goes on.
    """
    experience, _ = scored(SCORING)
    moved = replace(experience, logprobs_BR=experience.logprobs_BR - 1)
    old_actor, actor, old_critic, critic, stopped, metrics = updater()(moved)
    assert metrics["policy/approxkl_avg"] == pytest.approx(0.5, rel=1e-4)
    assert stopped
    assert metrics["val/stopped"] == 1
    for new, old in ((actor, old_actor), (critic, old_critic)):
        assert (schedule_step(old), schedule_step(new)) == (0, 1)
        assert same(rate_put_back(new, old), old)
    assert (actor.step, actor.skipped) == (0, 0)
    old_actor, actor, _, _, stopped, _ = updater()(experience, stopped=True)
    assert stopped
    assert same(rate_put_back(actor, old_actor), old_actor)


@functools.cache
def actor_gradients(model: Any, mesh: str, inference_tp: int, remat: Remat, num_parts: int) -> Any:
    """Gradients of the actor's loss on a hand-made experience."""
    driver = Driver(model, mesh, inference_tp)
    settings = replace(UPDATE, remat=remat, num_parts=num_parts)
    mask = (np.arange(R) < LENGTHS[:, None]) & (prompts().valid_B > 0)[:, None]
    rng, zeros = np.random.default_rng(5), np.zeros((8, R), np.float32)
    arrays: dict[str, Any] = {
        "tokens_BT": joined(), "prompt_lengths_B": PROMPT_LENGTHS, "response_lengths_B": LENGTHS,
        "logprobs_BR": zeros - 6, "ref_logprobs_BR": zeros, "values_BR": zeros,
        "advantages_BR": rng.normal(size=(8, R)).astype(np.float32), "returns_BR": zeros,
        "mask_BR": mask, "scores_B": zeros[:, 0], "valid_B": prompts().valid_B,
    }  # fmt: skip
    experience = Experience(**arrays)
    loss = partial(actor_loss, model=driver.place, settings=settings)
    run = driver.jit(lambda p, b: gradients(loss, p, b, num_actions, num_parts))
    return to_numpy(run(driver.actor(1), put_batch(experience, driver.engine.compute)))


def assert_same_gradients(one: Any, other: Any) -> None:
    """Within a millionth of values of order 0.01 to 1."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(remat: Remat):
    none, other = (actor_gradients(GATED, "1x1", 1, r, 1) for r in ("none", remat))
    assert_same_gradients(other, none)


def test_micro_batches_of_a_sharded_model_add_up():
    """Gradients, loss and every metric."""
    one, two = (actor_gradients(OPT, "4x2", 4, "full", parts) for parts in (1, 2))
    assert_same_gradients(two, one)


def test_padding_gets_no_gradient_in_a_gated_untied_model():
    grads, _, _ = actor_gradients(GATED, "1x1", 1, "none", 1)
    for table in (grads.embed_VW, grads.unembed_VW):
        assert (table[GATED.vocab_size :] == 0).all()
    assert np.abs(grads.unembed_VW[: GATED.vocab_size]).min(1).max() > 0
    for layer in grads.layers:
        for leaf in (layer.gate_FD, layer.up_FD, layer.down_FD):
            assert (leaf[GATED.mlp_width :] == 0).all()
            assert (np.abs(leaf[: GATED.mlp_width]).max(1) > 0).all()
