from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.objectives.experience import Experience, RewardSettings, build_experience
from rlhf_jax.objectives.losses import policy_loss, value_loss

B, P, R = 8, 3, 5
SETTINGS = RewardSettings(missing_eos_penalty=2.0)


def rollout(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    logprobs, ref_logprobs, values, entropies = rng.normal(size=(4, B, R)).astype(np.float32)
    lengths = np.array([5, 5, 1, 3, 4, 2, 5, 4], np.int32)
    return {
        "tokens_BT": rng.integers(3, 9, (B, P + R)).astype(np.int32),
        "prompt_lengths_B": np.full(B, P, np.int32),
        "response_lengths_B": lengths,
        "ended_B": np.array([False, True, True, True, True, True, False, True]),
        "valid_B": np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32),
        "logprobs_BR": logprobs,
        "ref_logprobs_BR": ref_logprobs,
        "values_BR": values,
        "scores_B": 4 * rng.normal(size=B).astype(np.float32),
        "entropies_BR": np.abs(entropies),
    }


@partial(jax.jit, static_argnums=0)
def everything(settings: RewardSettings, pieces: dict[str, Any]):
    """The experience, its metrics, and both losses after a small step."""
    experience, metrics = build_experience(settings, **pieces)
    e = experience
    _, policy = policy_loss(e.ref_logprobs_BR, e.logprobs_BR, e.advantages_BR, e.mask_BR, clip=0.2)
    _, value = value_loss(0.5 * e.values_BR, e.values_BR, e.returns_BR, e.mask_BR, clip=0.2)
    return experience, metrics | policy | value


def assert_same(found: dict[str, Any], expected: dict[str, Any], tol: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], err_msg=name, **tol)


def test_metrics_by_numpy(tolerance):
    pieces = rollout()
    experience, metrics = everything(SETTINGS, pieces)
    rows = range(6)
    lengths, scores = pieces["response_lengths_B"], pieces["scores_B"].astype(np.float64)
    sums = {
        name: [pieces[f"{name}_BR"][i, : lengths[i]].astype(np.float64).sum() for i in rows]
        for name in ("logprobs", "ref_logprobs", "entropies")
    }
    kl = np.mean(np.subtract(sums["logprobs"], sums["ref_logprobs"]))
    shaped = np.clip(scores, -5, 5) - 2 * ~pieces["ended_B"]
    expected = {
        "objective/kl": kl,
        "objective/entropy": np.mean(sums["entropies"]),
        "objective/non_score_reward": -0.1 * kl,
        "objective/rlhf_reward": -0.1 * kl + shaped[:6].mean(),
        "objective/scores": scores[:6].mean(),
        "val/num_eos_tokens": 5,
        "response_length/mean": 20 / 6,
        "response_length/min": 1,
        "response_length/max": 5,
        "response_length/clip_ratio": 1 / 6,
    }
    assert_same({name: metrics[name] for name in expected}, expected, tolerance(np.float32))
    np.testing.assert_array_equal(
        experience.mask_BR,
        (np.arange(R)[None] < lengths[:, None]) & (pieces["valid_B"] > 0)[:, None],
    )


def test_advantages_are_whitened_over_the_actions_of_valid_rows(tolerance):
    experience, _ = everything(SETTINGS, rollout())
    kept = np.asarray(experience.advantages_BR)[np.asarray(experience.mask_BR)]
    np.testing.assert_allclose([kept.mean(), kept.std()], [0, 1], **tolerance(np.float32))


def test_train_eos_false_drops_the_stop_action_of_ended_rows_alone():
    pieces = rollout()
    with_eos, _ = everything(SETTINGS, pieces)
    without, _ = everything(RewardSettings(train_eos=False), pieces)
    dropped = np.asarray(with_eos.mask_BR) & ~np.asarray(without.mask_BR)
    rows, slots = np.nonzero(dropped)
    np.testing.assert_array_equal(rows, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(slots, pieces["response_lengths_B"][rows] - 1)


def test_what_filler_rows_hold_changes_no_number():
    pieces, other = rollout(0), rollout(1)
    mixed = {}
    for name, array in pieces.items():
        row_is_valid = pieces["valid_B"].astype(bool).reshape(B, *[1] * (array.ndim - 1))
        mixed[name] = np.where(row_is_valid, array, other[name]).astype(array.dtype)
    mixed["response_lengths_B"][6:] = 2
    mixed["ended_B"][6:] = True
    mixed["values_BR"][6:] = np.nan
    (a, metrics), (b, mixed_metrics) = everything(SETTINGS, pieces), everything(SETTINGS, mixed)
    for name in ("advantages_BR", "returns_BR", "mask_BR"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert not np.asarray(getattr(a, name))[6:].any()
    assert_same(metrics, mixed_metrics, {"rtol": 0, "atol": 0})


def test_wider_padding_changes_no_number(tolerance):
    pieces = rollout()
    wide = dict(pieces)
    for name, array in pieces.items():
        if name.endswith(("_BR", "_BT")):
            wide[name] = np.pad(array, ((0, 0), (0, 4)), constant_values=7)
    (a, metrics), (b, wide_metrics) = everything(SETTINGS, pieces), everything(SETTINGS, wide)
    for name in ("advantages_BR", "returns_BR", "mask_BR"):
        padded = np.asarray(getattr(b, name))
        np.testing.assert_allclose(getattr(a, name), padded[:, :R], **tolerance(np.float32))
        assert not padded[:, R:].any()
    assert_same(metrics, wide_metrics, tolerance(np.float32))


def test_a_sharded_batch_gives_the_same_numbers(tolerance):
    """Every row on its own device, all mesh axes explicit: what does not shard fails to trace."""
    pieces = rollout()
    mesh = make_mesh(parse_mesh("8x1"), inference_tp=1)
    layout = Layout.create(mesh, "compute", {})
    expected, expected_metrics = everything(SETTINGS, pieces)
    with jax.set_mesh(mesh):
        sharded, metrics = everything(SETTINGS, put_batch(pieces, layout))
    assert_same(metrics, expected_metrics, tolerance(np.float32))
    assert isinstance(sharded, Experience)
    for found, value in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, value, **tolerance(np.float32))
    row_sharding = layout.sharding("batch", None)
    assert sharded.advantages_BR.sharding.is_equivalent_to(row_sharding, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 1.1),
        ("lam", -0.1),
        ("kl_coef", -1.0),
        ("kl_kind", "k2"),
        ("score_clip", 0.0),
        ("missing_eos_penalty", -1.0),
    ],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        RewardSettings(**{field: value})
