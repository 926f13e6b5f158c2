"""The DPO loss against float64 loops, and its properties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.objectives.dpo import answer_logprob, dpo_loss
from rlhf_jax.objectives.losses import prediction_mask
from tests.reference import dpo as truth

PAD, EOS = 0, 1
ROWS = {
    "chosen": [[7, 8, 5, 6, EOS], [9, 5, 4, 3, EOS], [7, 6, EOS, PAD, PAD]],
    "rejected": [[7, 8, 5, EOS, PAD], [9, 4, EOS, PAD, PAD], [7, 5, 5, 5, EOS]],
}
"""The first pair shares a token of its answers. Prompts have 2, 1 and 1 tokens."""
PROMPTS = np.array([2, 1, 1])
LENGTHS = {"chosen": np.array([5, 5, 3]), "rejected": np.array([4, 3, 5])}


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of chosen and rejected rows; what both rows begin with gets the same."""
    rng = np.random.default_rng(seed)
    chosen, rejected = -rng.exponential(size=(2, 3, 4)).astype(np.float32)
    same = np.array(ROWS["chosen"]) == np.array(ROWS["rejected"])
    shared = np.logical_and.accumulate(same, axis=1)[:, 1:]
    return chosen, np.where(shared, chosen, rejected)


def ours(policy, reference, lengths=LENGTHS, *, beta=0.1, label_smoothing=0.0):
    """Loss and metrics through the mask of answers."""
    sums = []
    for logprobs in (policy, reference):
        for kind, values in zip(("chosen", "rejected"), logprobs, strict=True):
            mask = prediction_mask(
                jnp.asarray(lengths[kind]), jnp.asarray(PROMPTS), jnp.ones(3), width=4,
                train_on="completion",
            )  # fmt: skip
            sums.append(answer_logprob(jnp.asarray(values), mask))
    chosen, rejected, ref_chosen, ref_rejected = sums
    return dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, jnp.ones(3),
        beta=beta, label_smoothing=label_smoothing,
    )  # fmt: skip


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_loss_and_metrics_equal_the_definition(label_smoothing, tolerance):
    policy, reference = draw(0), draw(1)
    loss, metrics = ours(policy, reference, beta=0.3, label_smoothing=label_smoothing)
    sums = np.array([
        [truth.answer_logprob(values[row], PROMPTS[row], LENGTHS[kind][row]) for row in range(3)]
        for logprobs in (policy, reference)
        for kind, values in zip(("chosen", "rejected"), logprobs, strict=True)
    ])  # fmt: skip
    rewards = 0.3 * (sums[:2] - sums[2:])
    margins = rewards[0] - rewards[1]
    expected = {
        "loss": np.mean([truth.pair_loss(margin, label_smoothing) for margin in margins]),
        "rewards/chosen": rewards[0].mean(),
        "rewards/rejected": rewards[1].mean(),
        "rewards/accuracies": (margins > 0).mean(),
        "rewards/margins": margins.mean(),
        "logps/chosen": sums[0].mean(),
        "logps/rejected": sums[1].mean(),
    }
    assert 0 < expected["rewards/accuracies"] < 1
    np.testing.assert_allclose(loss, expected["loss"], **tolerance(np.float32))
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, **tolerance(np.float32), err_msg=name)


@pytest.mark.parametrize(("pad", "dropped"), [(PAD, 0), (EOS, 1)])
def test_deepspeed_chat_differs_in_the_eos_alone(pad, dropped, tolerance):
    """Its zeroing before the rows part changes no loss: what they share cancels. Where pad and EOS
    are one token, as it sets them, its sum leaves the EOS out."""
    policy, reference = draw(2), draw(3)
    chosen, rejected = (
        np.where(np.array(ROWS[kind]) == PAD, pad, np.array(ROWS[kind]))
        for kind in ("chosen", "rejected")
    )
    expected = truth.deepspeed_chat(chosen, rejected, policy, reference, pad, 0.5, 0.1)
    shorter = {kind: lengths - dropped for kind, lengths in LENGTHS.items()}
    loss, _ = ours(policy, reference, shorter, beta=0.5, label_smoothing=0.1)
    np.testing.assert_allclose(loss, expected, **tolerance(np.float32))
    if dropped:
        assert abs(ours(policy, reference, beta=0.5, label_smoothing=0.1)[0] - expected) > 1e-3


def margin_loss(margin: jax.Array, **settings) -> jax.Array:
    zero = jnp.zeros(1)
    return dpo_loss(margin, zero, zero, zero, jnp.ones(1), beta=1.0, **settings)[0]


def test_the_gradient_raises_chosen_and_lowers_rejected_answers():
    args = [jnp.asarray(x) for x in ([-3.0, -1.0, -9.0], [-2.0, -4.0, -1.0])]
    ref_chosen, ref_rejected = jnp.full(3, -2.0), jnp.asarray([-3.0, -1.0, -3.0])
    valid = jnp.asarray([1.0, 1.0, 0.0])

    def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, valid, beta=0.5)[0]

    grad = jax.grad(loss, (0, 1))
    chosen, rejected = grad(*args)
    assert (chosen[:2] < 0).all()
    assert (rejected[:2] > 0).all()
    np.testing.assert_allclose(chosen, -rejected, rtol=1e-6)
    assert abs(chosen[0]) > abs(chosen[1]), "the pair that is ranked wrong pulls harder"
    assert chosen[2] == rejected[2] == 0, "a filler row pulls at nothing"


def test_at_the_reference_the_loss_is_log_2(tolerance):
    policy = draw(4)
    for label_smoothing in (0.0, 0.3):
        loss, metrics = ours(policy, policy, label_smoothing=label_smoothing)
        np.testing.assert_allclose(loss, np.log(2), **tolerance(np.float32))
        assert metrics["rewards/margins"] == 0
        assert metrics["rewards/accuracies"] == 0.5  # every pair is a tie


def test_label_smoothing_gives_the_margin_a_finite_optimum():
    """`log((1 - ε)/ε)`; without it every margin is still too small."""
    slope = jax.grad(lambda margin, **settings: margin_loss(margin, **settings).sum())
    optimum = jnp.log(jnp.asarray([0.9 / 0.1]))
    np.testing.assert_allclose(slope(optimum, label_smoothing=0.1), 0, atol=1e-6)
    assert slope(optimum - 1, label_smoothing=0.1) < 0 < slope(optimum + 1, label_smoothing=0.1)
    assert slope(optimum + 5) < 0


def test_the_loss_is_finite_at_extreme_margins():
    for margin in (-1e4, 1e4):
        value, grad = jax.value_and_grad(partial(margin_loss, label_smoothing=0.0))(
            jnp.asarray([margin])
        )
        assert np.isfinite(value)
        assert np.isfinite(grad).all()
