"""Scoring and updates whose rows share sequences equal those with every row alone."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.data.placing import Groups, alone, balance, place
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.ppo_step import (
    Scorers,
    ScoringSettings,
    UpdateSettings,
    ppo_gradients,
    score_rollout,
)
from rlhf_jax.engine.state import TrainState
from rlhf_jax.models.packed_rows import (
    Places,
    answers_first,
    answers_in_rows,
    pack_rows,
    read_rows,
)
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.objectives.experience import Experience, RewardSettings
from tests.engine.drive import Driver, to_numpy
from tests.models.cases import LLAMA, OPT

B, P, R = 32, 8, 8
RNG = np.random.default_rng(0)
PROMPT_LENGTHS = RNG.integers(1, P + 1, B).astype(np.int32)
LENGTHS = RNG.choice([1, 1, 2, 2, 3, 4, R], B).astype(np.int32)
VALID = np.ones(B, np.float32)
VALID[[9, 31]] = 0
LENGTHS[VALID == 0] = 0
SIZES = np.where(VALID > 0, PROMPT_LENGTHS + LENGTHS, 0)
MASK = np.arange(R) < LENGTHS[:, None]
SCORING = ScoringSettings(
    reward=RewardSettings(), temperature=0.7, score_mean=0.3, score_std=2.0,
    recompute_logprobs=True, rollout_is_threshold=2.0,
)  # fmt: skip
UPDATE = UpdateSettings(
    temperature=0.7, clip_range=0.2, value_clip_range=0.2, value_coef=0.5,
    entropy_coef=0.01, target_kl=None, num_parts=1, remat="full",
)  # fmt: skip
GATED = replace(LLAMA, num_layers=1)
RUNS = [
    pytest.param(OPT, "4x2", 2, np.float32, id="4x2_in_two_parts"),
    pytest.param(GATED, "8x1", 1, np.float32, id="rope_8x1"),
    pytest.param(OPT, "1x1", 1, jnp.bfloat16, id="bf16"),
]


def prompts() -> PromptBatch:
    tokens = np.random.default_rng(1).integers(3, 99, (B, P)).astype(np.int32)
    return PromptBatch(tokens, PROMPT_LENGTHS, np.arange(B, dtype=np.int32), VALID)


def rollout() -> Rollout:
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {
        "tokens_BR": np.where(MASK, rng.integers(3, 99, (B, R)), 0).astype(np.int32),
        "logprobs_BR": np.where(MASK, -4.5, 0).astype(np.float32),
        "lengths_B": LENGTHS,
        "ended_B": LENGTHS < R,
    }
    return Rollout(**arrays)


type Way = Literal["own", "dealt", "alone"]
"""Shards pack rows of their own, or any rows; or no row shares a sequence."""
WAYS: list[Way] = ["own", "dealt", "alone"]


def places_for(driver: Driver, way: Way, parts: int = 1, lengths: np.ndarray = SIZES) -> Places:
    """Places that save something, but for rows that are alone, on the devices."""
    groups = Groups(driver.engine.compute.batch_size_divisor, parts)
    if way == "alone":
        return put_batch(alone(lengths, groups, P + R), driver.engine.compute)
    order = balance(lengths, groups)[::-1] if way == "dealt" else np.arange(B)
    found = place(lengths[order], groups, width=P + R, unpacked=P + R)
    assert found is not None, "the rows of these tests fit in seven eighths"
    return put_batch(found.of_rows(order) if way == "dealt" else found, driver.engine.compute)


@functools.cache
def scored(model: Any, mesh: str, dtype: Any, packed: bool) -> tuple[Experience, dict[str, Any]]:
    driver = Driver(model, mesh, dtype=dtype, inference_tp=int(mesh[-1]))
    score = driver.jit(score_rollout, actor=driver.place, critic=driver.place, settings=SCORING)
    models = Scorers(driver.actor(1), driver.actor(2), driver.scalar(3), driver.scalar(4))
    batch = put_batch((prompts(), rollout()), driver.engine.compute)
    places = places_for(driver, "dealt") if packed else None
    experience, _, metrics = to_numpy(score(models, *batch, None, Control(), places))
    return experience, metrics


@pytest.mark.parametrize(("model", "mesh", "parts", "dtype"), RUNS)
def test_scoring(model: Any, mesh: str, parts: int, dtype: Any, tolerance) -> None:
    """Every metric, and of the experience what is inside answers."""
    del parts
    (got, metrics), (want, expected) = (scored(model, mesh, dtype, p) for p in (True, False))
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, err_msg=name, **tolerance(dtype))
    np.testing.assert_array_equal(got.mask_BR, want.mask_BR)
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns", "weights"):
        a, b = (getattr(e, f"{name}_BR")[MASK] for e in (got, want))
        np.testing.assert_allclose(a, b, err_msg=name, **tolerance(dtype))
    real = VALID > 0
    np.testing.assert_allclose(got.scores_B[real], want.scores_B[real], **tolerance(dtype))


@pytest.mark.parametrize(("model", "mesh", "parts", "dtype"), RUNS)
def test_gradients(
    model: Any, mesh: str, parts: int, dtype: Any, tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows in any order, in parts with sequences of their own, logits of few positions at a
    time; both sides are rounded.
    """
    monkeypatch.setattr("rlhf_jax.models.scoring.CHUNK", 8)
    driver = Driver(model, mesh, dtype=dtype, inference_tp=int(mesh[-1]))
    experience, _ = scored(model, mesh, dtype, False)
    rows = np.random.default_rng(4).permutation(B).astype(np.int32)
    places = places_for(driver, "own", parts, SIZES[rows])
    states = [
        TrainState(each, None, (), jnp.int32(0), jnp.int32(0))
        for each in (driver.actor(1), driver.scalar(3))
    ]
    settings = replace(UPDATE, num_parts=parts)
    compute = driver.jit(
        lambda *args: ppo_gradients(
            *args[:-1], places=args[-1],
            actor_place=driver.place, critic_place=driver.place, settings=settings,
        )
    )  # fmt: skip
    args = (*states, put_batch(experience, driver.engine.compute), rows, jnp.bool_(False))
    got, want = (to_numpy(compute(*args, each)) for each in (places, None))
    assert want.finite
    for name, value in want.metrics.items():
        np.testing.assert_allclose(got.metrics[name], value, err_msg=name, **tolerance(dtype))
    for a, b in zip(got.norms, want.norms, strict=True):
        np.testing.assert_allclose(a, b, **tolerance(dtype))
    for one, other in ((got.actor, want.actor), (got.critic, want.critic)):
        leaves = jax.tree.leaves(other)
        floor = 0.05 * max(np.linalg.norm(grad) for grad in leaves)
        for a, b in zip(jax.tree.leaves(one), leaves, strict=True):
            largest = max(np.linalg.norm(b), floor)
            assert np.linalg.norm(a - b) < 2 * tolerance(dtype)["atol"] * largest


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_rows_are_read_back_as_they_were_packed(mesh: str, way: Way) -> None:
    driver = Driver(OPT, mesh, inference_tp=int(mesh[-1]))
    layout, places = driver.engine.compute, places_for(driver, way)
    tokens = np.random.default_rng(5).integers(1, 99, (B, P + R)).astype(np.int32)
    tokens = np.where(np.arange(P + R) < SIZES[:, None], tokens, 0)

    def there_and_back(tokens: jax.Array, places: Places) -> Any:
        packed, starts = pack_rows(tokens, places, layout)
        read = partial(read_rows, length=P + R, places=places, layout=layout)
        return packed, starts, *(read(x, jnp.zeros_like(places.begins_B)) for x in (packed, starts))

    packed, starts, back, firsts = to_numpy(
        driver.jit(there_and_back)(put_batch(tokens, layout), places)
    )
    np.testing.assert_array_equal(back, tokens)
    assert np.count_nonzero(packed) == SIZES.sum()
    assert (starts <= np.arange(places.length)).all()
    assert (np.diff(starts, axis=1) >= 0).all()
    inside = np.arange(P + R) < SIZES[:, None]
    begins = in_rows(np.asarray(places.begins_B) % places.length, places)[:, None]
    np.testing.assert_array_equal(firsts, np.where(inside, begins, 0))


def in_rows(entries_B: np.ndarray, places: Places) -> np.ndarray:
    """What belongs to the entries of places, in the order of the batch."""
    if places.rows_B is None:
        return entries_B
    found = np.empty_like(entries_B)
    found[np.asarray(places.rows_B)] = entries_B
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_answers_stand_first_and_go_back_to_their_rows(mesh: str, way: Way) -> None:
    """What predicts a token is what stands before it: here every token's number is its own."""
    driver = Driver(OPT, mesh, inference_tp=int(mesh[-1]))
    layout, places = driver.engine.compute, places_for(driver, way)
    numbers = 1 + np.arange(B * (P + R), dtype=np.int32).reshape(B, P + R)
    targets = np.stack([row[n : n + R] for row, n in zip(numbers, PROMPT_LENGTHS, strict=True)])

    def there_and_back(tokens: jax.Array, targets: jax.Array, prompts: jax.Array, places: Places):
        packed, _ = pack_rows(tokens, places, layout)
        where = prompts, places, layout
        hidden, moved, counts = answers_first(packed[..., None], targets, *where)
        back = answers_in_rows(moved, *where)
        return hidden[..., 0], moved, counts, back

    args = put_batch((numbers, targets, PROMPT_LENGTHS), layout)
    before, moved, counts, back = to_numpy(driver.jit(there_and_back)(*args, places))
    np.testing.assert_array_equal(in_rows(counts, places), LENGTHS)
    np.testing.assert_array_equal(back, np.where(MASK, targets, 0))
    np.testing.assert_array_equal(before, np.where(moved > 0, moved - 1, 0))
    shards = layout.batch_size_divisor
    real = (moved > 0).reshape(shards, -1)
    for shard, number in zip(real, counts.reshape(shards, -1).sum(1), strict=True):
        assert shard[:number].all()
        assert not shard[number:].any()
