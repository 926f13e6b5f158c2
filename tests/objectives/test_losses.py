from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.objectives.losses import (
    divergence_mask,
    of_whole_batch,
    pairwise_loss,
    policy_loss,
    prediction_mask,
    sft_loss,
    value_loss,
)
from rlhf_jax.objectives.masked import length_mask, masked_mean, masked_var

B, R = 4, 5
MASK = length_mask(jnp.asarray([5, 3, 1, 0]), R)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_prediction_masks_by_hand():
    """Rows: prompt of 2 in 4 tokens; no prompt (plain text); filler. Entry t predicts t + 1."""
    lengths, prompts, valid = (jnp.asarray(x) for x in ([4, 3, 5], [2, 0, 2], [1.0, 1.0, 0.0]))
    build = partial(prediction_mask, lengths, prompts, valid, width=4)
    np.testing.assert_array_equal(build(train_on="all"), [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(
        build(train_on="completion"), [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    )
    with pytest.raises(ValueError, match='"all" or "completion"'):
        build(train_on="prompt")  # pyright: ignore[reportArgumentType]


def test_sft_loss_of_a_uniform_model_is_log_of_the_vocabulary(tolerance):
    logprobs = jnp.where(MASK, -jnp.log(256.0), jnp.nan)
    np.testing.assert_allclose(sft_loss(logprobs, MASK), np.log(256), **tolerance(np.float32))


def pairs_of_scores(chosen: float, rejected: float, **kwargs):
    """One pair that differs in its second and last token, with constant scores."""
    return pairwise_loss(
        jnp.full((1, 3), chosen),
        jnp.full((1, 3), rejected),
        jnp.asarray([[5, 6, 0]]),
        jnp.asarray([[5, 7, 0]]),
        jnp.asarray([2]),
        jnp.asarray([2]),
        jnp.asarray([1.0]),
        **kwargs,
    )


@pytest.mark.parametrize("span", ["last", "divergence"])
def test_pairwise_loss_is_stable_at_extreme_margins(span):
    """`-log σ(m)` is `-m` far below 0 and 0 far above it; log(σ(m)) would be -inf."""
    right, wrong = (pairs_of_scores(m, -m, span=span) for m in (500.0, -500.0))
    assert (right.loss, right.accuracy) == (0, 1)
    assert (wrong.loss, wrong.accuracy) == (1000, 0)
    slope = jax.grad(lambda m: pairs_of_scores(m, -m, span=span).loss)(-500.0)
    assert slope == -2


def test_a_tie_counts_one_half():
    assert pairs_of_scores(0.3, 0.3).accuracy == 0.5


def test_pairwise_spans_agree_where_one_token_differs(tolerance):
    last, divergence = (pairs_of_scores(0.3, 0.1, span=s) for s in ("last", "divergence"))
    np.testing.assert_allclose(last.loss, divergence.loss, **tolerance(np.float32))


def test_centering_adds_the_mean_square_of_the_scores(tolerance):
    plain, centered = (pairs_of_scores(3.0, 1.0, center_coef=c) for c in (0.0, 0.01))
    np.testing.assert_allclose(centered.loss - plain.loss, 0.05, **tolerance(np.float32))


@pytest.mark.parametrize("span", ["last", "divergence"])
@pytest.mark.parametrize("margin", [0.0, 0.7, 3.0])
def test_a_margin_is_taken_off_the_difference_of_the_scores(span, margin, tolerance):
    """Llama 2's loss; accuracy is still that of the scores."""
    pairs = pairs_of_scores(1.2, 0.9, margins_B=jnp.asarray([margin]), span=span)
    expected = np.log1p(np.exp(-(1.2 - 0.9 - margin)))
    np.testing.assert_allclose(pairs.loss, expected, **tolerance(np.float32))
    assert pairs.accuracy == 1


def test_every_pair_has_its_own_margin(tolerance):
    """A margin of m is a chosen answer that scores m less, in each row; filler has none."""
    scores, tokens = normal(0, 2, B, R), jax.random.randint(jax.random.key(1), (2, B, R), 3, 9)
    margins = jnp.asarray([0.0, 1.0, 2.0, 50.0])
    rest = (*tokens, jnp.full(B, R), jnp.full(B, R), jnp.asarray([1.0, 1.0, 1.0, 0.0]))
    pairs = (*scores, *rest)
    lower = (scores[0] - margins[:, None], *pairs[1:])
    for span in ("last", "divergence"):
        loss = partial(pairwise_loss, span=span)
        found = loss(*pairs, margins_B=margins).loss
        np.testing.assert_allclose(found, loss(*lower).loss, **tolerance(np.float32))
        assert found > loss(*pairs).loss


def test_divergence_mask_reads_lengths_not_pad_ids():
    """The pad id is the stop token's, 9: rows end with it, one of them cut off before it."""
    chosen, rejected = jnp.asarray([[5, 6, 9, 9], [5, 6, 9, 9]]), jnp.asarray([[5, 6, 9, 9]] * 2)
    mask = divergence_mask(chosen, rejected, jnp.asarray([3, 3]), jnp.asarray([2, 3]))
    np.testing.assert_array_equal(mask, [[0, 0, 1, 0], [0, 0, 0, 1]])


def test_filler_pairs_change_nothing(tolerance):
    scores, tokens = normal(0, 2, B, R), jax.random.randint(jax.random.key(1), (2, B, R), 3, 9)
    pairs = (*scores, *tokens, jnp.full(B, R), jnp.full(B, R), jnp.asarray([1.0, 1.0, 1.0, 0.0]))
    for span in ("last", "divergence"):
        loss = partial(pairwise_loss, span=span, center_coef=0.1)
        filled, alone = loss(*pairs), loss(*(x[:3] for x in pairs))
        for name in ("loss", "accuracy"):
            a, b = getattr(filled, name), getattr(alone, name)
            np.testing.assert_allclose(a, b, **tolerance(np.float32))


def test_policy_gradient_before_any_update_is_minus_the_advantage(tolerance):
    """At ratio 1: d loss / d logp = -A / number of actions, and nothing is clipped."""
    logprobs, advantages = normal(0, B, R), normal(1, B, R)
    loss = partial(policy_loss, clip=0.2)
    grads, metrics = jax.jit(jax.grad(loss, has_aux=True))(logprobs, logprobs, advantages, MASK)
    expected = np.where(MASK, -np.asarray(advantages) / np.asarray(MASK).sum(), 0)
    np.testing.assert_allclose(grads, expected, **tolerance(np.float32))
    assert metrics["val/ratio"] == 1
    for name in ("policy/clipfrac_avg", "policy/approxkl_avg", "square/ratio"):
        assert metrics[name] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [(1.5, 1.0, True), (0.5, 1.0, False), (1.5, -1.0, False), (0.5, -1.0, True)],
)
def test_the_policy_stops_only_where_it_went_too_far_in_the_good_direction(
    ratio, advantage, is_clipped
):
    loss = partial(policy_loss, clip=0.2)
    ones = jnp.ones((1, 1))
    grads, metrics = jax.grad(loss, has_aux=True)(
        jnp.log(ratio) * ones, 0 * ones, advantage * ones, ones
    )
    assert (grads == 0).all() == is_clipped
    assert bool(metrics["policy/clipfrac_avg"]) == is_clipped


def test_value_loss_takes_the_worse_of_both_and_none_does_not_clip(tolerance):
    """V 1, old V 0, return 1: exact, but 0.2 is as far as it may have come. Half of 0.8²."""
    ones = jnp.ones((1, 1))
    clipped, metrics = value_loss(ones, 0 * ones, ones, ones, clip=0.2)
    np.testing.assert_allclose(clipped, 0.32, **tolerance(np.float32))
    assert metrics["val/clipfrac_avg"] == 1
    plain, metrics = value_loss(ones, 0 * ones, ones, ones, clip=None)
    assert (plain, metrics["val/clipfrac_avg"]) == (0, 0)


def test_explained_variance_of_perfect_constant_and_undefined_values(tolerance):
    returns = normal(0, B, R)
    for values, expected in ((returns + 3, 1.0), (0 * returns, 0.0), (2 * returns, 0.0)):
        explained = whole_batch([(values, returns, MASK)])["critic/vf_explained_var"]
        np.testing.assert_allclose(explained, expected, **tolerance(np.float32))
    constant = whole_batch([(returns, jnp.ones((B, R)), MASK)])
    assert constant["critic/vf_explained_var"] == 0


def whole_batch(parts: list[Any]) -> dict[str, jax.Array]:
    """Metrics of parts `(values, returns, mask)`, averaged by their actions. Log-ratios are a tenth
    of the errors.
    """
    total: dict[str, jax.Array] = {}
    values, returns, mask = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    center, returns_var = masked_mean(values - returns, mask) + 0.1, masked_var(returns, mask)
    for values, returns, mask in parts:
        share = mask.sum() / sum(each[2].sum() for each in parts)
        log_ratio = 0.1 * (values - returns)
        _, policy = policy_loss(log_ratio, 0 * values, returns, mask, clip=0.2)
        _, value = value_loss(values, values, returns, mask, center, clip=None)
        for name, metric in (policy | value).items():
            total[name] = total.get(name, jnp.float32(0.0)) + share * metric
    return of_whole_batch(total, returns_var)


@pytest.mark.parametrize("num_parts", [1, 2, B])
def test_variances_of_parts_are_those_of_the_batch(num_parts: int, tolerance) -> None:
    """In NumPy; rows have returns of their own, so that a part knows little of the whole, and all
    are far from 0.
    """
    returns = 100 + normal(0, B, R) + 5 * jnp.arange(B)[:, None]
    values = returns - 90 + 0.5 * normal(1, B, R)
    parts = [
        tuple(array[n::num_parts] for array in (values, returns, MASK)) for n in range(num_parts)
    ]
    got = whole_batch(parts)
    kept = np.asarray(MASK, bool)
    error, whole = (np.asarray(x, np.float64)[kept] for x in (values - returns, returns))
    explained = 1 - error.var() / whole.var()
    np.testing.assert_allclose(got["critic/vf_explained_var"], explained, rtol=1e-5)
    ratio = np.exp(0.1 * error)
    np.testing.assert_allclose(got["val/ratio_var"], ratio.var(), rtol=1e-4, atol=1e-6)
    assert not [name for name in got if name.startswith(("mean/", "square/"))]


def test_what_the_mask_leaves_out_reaches_no_gradient() -> None:
    values = jnp.where(MASK, normal(0, B, R), jnp.nan)
    grads, metrics = jax.grad(value_loss, has_aux=True)(
        values, 0 * values, normal(1, B, R), MASK, clip=0.2
    )
    assert jnp.isfinite(grads).all()
    assert all(jnp.isfinite(metric) for metric in metrics.values())


@pytest.mark.parametrize("span", ["last", "divergence"])
def test_sharded_pairs_give_the_same_loss_and_gradients(span, tolerance):
    """One row a device, all mesh axes explicit: what does not shard fails to trace."""

    @jax.jit
    def loss_and_grads(scores, other):
        return jax.value_and_grad(lambda s: pairwise_loss(*s, *other, span=span).loss)(scores)

    rows = 8
    rng = np.random.default_rng(0)
    scores = tuple(rng.normal(size=(2, rows, R)).astype(np.float32))
    tokens = rng.integers(3, 5, (2, rows, R)).astype(np.int32)
    lengths = rng.integers(1, R + 1, (2, rows)).astype(np.int32)
    other = (*tokens, *lengths, np.ones(rows, np.float32))
    mesh = make_mesh(parse_mesh("8x1"), inference_tp=1)
    layout = Layout.create(mesh, "compute", {})
    expected = loss_and_grads(scores, other)
    with jax.set_mesh(mesh):
        found = loss_and_grads(put_batch(scores, layout), put_batch(other, layout))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance(np.float32))
