"""Training, generating and updating with adapters: what moves, how fast, and what stays."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.ppo_step import UpdateSettings, ppo_update
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.engine.step import gradients, train_step
from rlhf_jax.models.adapted import Adapted, add_up
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, adapters_in, combine, split, trains
from rlhf_jax.models.params import (
    compute_layout,
    param_specs,
    scalar_specs,
    shardings,
    store_layout,
)
from rlhf_jax.objectives.experience import Experience
from tests.engine.drive import PROMPT_LENGTHS, P, prompts, to_numpy
from tests.models.cases import LLAMA, OPT, put_params, random_values
from tests.reference import lora as truth

ONLY = LoRAConfig(dim=2, alpha=4.0, only=True)
MIXED = replace(ONLY, only=False, modules=("q_proj", "v_proj", "fc2"))
RATE, DECAY = 1e-3, 0.1


def whole(cfg: Any, lora: LoRAConfig, *, scalar: bool = False) -> tuple[Any, Any]:
    """Declarations and NumPy values of a model with adapters."""
    specs = adapted_specs(scalar_specs(cfg) if scalar else param_specs(cfg), cfg, lora)
    return specs, random_values(specs, seed=4 + scalar)


def parts(
    cfg: Any, lora: LoRAConfig, mesh: Any, *, scalar: bool = False, dtype: Any = np.float32
) -> tuple[Any, Any, Any]:
    """What trains, its declarations, and the rest, in STORE."""
    specs, values = whole(cfg, lora, scalar=scalar)
    params = put_params(values, specs, store_layout(cfg, mesh), dtype)
    trained, frozen = split(params, trains(specs, lora))
    return trained, split(specs, trains(specs, lora))[0], frozen


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def test_adapters_and_the_rest_have_their_own_rates_and_all_matrices_decay():
    """The first step of AdamW is -rate · (sign(g) + decay · w), whatever the gradient's size."""
    mesh = make_mesh(parse_mesh("1x1"), 1)
    trained, specs, _ = parts(OPT, MIXED, mesh)
    config = OptimizerConfig(
        learning_rate=RATE, schedule="constant", weight_decay=DECAY, clip_norm=1e9, eps=1e-12
    )
    optimizer = make_optimizer(config, specs, 10, adapter_rate=0.5)
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.3), trained)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(trained), trained)
    seen = set()
    for (path, update), weight in zip(
        jax.tree.leaves_with_path(updates), jax.tree.leaves(trained), strict=True
    ):
        name = path_name(path)
        rate = 0.5 if name.endswith(("side_FA", "core_AD")) else RATE
        decay = DECAY if np.ndim(weight) > 1 else 0.0
        expected = rate * (1 - decay * np.asarray(weight))
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-7, err_msg=name)
        seen.add((rate, decay))
    assert seen == {(0.5, DECAY), (RATE, DECAY), (RATE, 0.0)}


def test_without_a_rate_of_their_own_adapters_have_that_of_the_rest():
    mesh = make_mesh(parse_mesh("1x1"), 1)
    trained, specs, _ = parts(OPT, MIXED, mesh)
    config = OptimizerConfig(learning_rate=RATE, schedule="constant", clip_norm=1e9, eps=1e-12)
    optimizer = make_optimizer(config, specs, 10)
    grads = jax.tree.map(jnp.ones_like, trained)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(trained), trained)
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -RATE, rtol=1e-4)


def test_one_norm_clips_adapters_and_the_rest_together():
    mesh = make_mesh(parse_mesh("1x1"), 1)
    trained, specs, _ = parts(OPT, MIXED, mesh)
    optimizer = make_optimizer(OptimizerConfig(RATE, clip_norm=2.0, beta1=0.9), specs, 10)
    with jax.set_mesh(mesh):
        _, state = jax.jit(optimizer.update)(trained, optimizer.init(trained), trained)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(to_numpy(trained))))
    first = optax.tree.get(state, "mu")
    for moment, leaf in zip(jax.tree.leaves(first), jax.tree.leaves(trained), strict=True):
        np.testing.assert_allclose(moment, 0.1 * leaf * 2.0 / norm, rtol=1e-4, atol=1e-7)


def loss_fn(params: Any, batch: Any, *, cfg: Any, layout: Any) -> Any:
    hidden = forward(params, batch["tokens"], cfg, layout, remat="full")
    return (hidden.astype(jnp.float32) * batch["direction"]).sum(), {}


def batch_of(cfg: Any, layout: Any) -> Any:
    rng = np.random.default_rng(7)
    return put_batch(
        {
            "tokens": rng.integers(3, 99, (8, 5)).astype(np.int32),
            "direction": rng.normal(size=(8, 5, cfg.embed_width)).astype(np.float32),
        },
        layout,
    )


@functools.cache
def trained_twice(lora: LoRAConfig, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """State, frozen weights and what both were before, after two steps in bfloat16 on 4x2."""
    mesh = make_mesh(parse_mesh("4x2"), 2)
    layout = compute_layout(OPT, mesh)
    trained, specs, frozen = parts(OPT, lora, mesh, dtype=jnp.bfloat16)
    before = to_numpy((trained, frozen))
    optimizer = make_optimizer(OptimizerConfig(RATE), specs, 10, adapter_rate=lora.learning_rate)
    step = jax.jit(
        partial(
            train_step,
            loss_fn=partial(loss_fn, cfg=OPT, layout=layout),
            weight_fn=lambda batch: jnp.float32(batch["tokens"].shape[0]),
            optimizer=optimizer,
            num_parts=1,
        ),
        donate_argnums=0,
    )
    key = jax.random.key(seed) if lora.dropout else None
    with jax.set_mesh(mesh):
        state = create_state(trained, optimizer)
        for _ in range(2):
            state, _ = step(state, batch_of(OPT, layout), frozen, key)
    assert (state.step, state.skipped) == (2, 0)
    return to_numpy(state), to_numpy(frozen), before[0], before[1]


@pytest.mark.parametrize("lora", [ONLY, MIXED], ids=["only", "mixed"])
def test_training_moves_what_trains_and_leaves_the_base_bit_identical(lora):
    """The old state is donated (an unused buffer would be a warning, so an error), `frozen` not."""
    state, frozen, trained_before, frozen_before = trained_twice(lora)
    jax.tree.map(np.testing.assert_array_equal, frozen, frozen_before)
    bases = [weight.base_FD for _, weight in adapters_in(frozen)]
    assert bases
    assert all(base is not None for base in bases)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), state.params, trained_before)
    assert all(jax.tree.leaves(moved))


def test_the_state_holds_what_trains_and_no_more():
    """A checkpoint of it has masters and moments of adapters alone."""
    state, *_ = trained_twice(ONLY)
    names = {path_name(path) for path, _ in jax.tree.leaves_with_path(state.params)}
    assert names == {
        f"layers.0.{matrix}.{factor}"
        for matrix in ("qkv_ED", "out_ED", "up_FD", "down_FD")
        for factor in ("side_FA", "core_AD")
    }
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state.params))
    for tree in (state.master, *(optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))):
        assert sorted(leaf.shape for leaf in jax.tree.leaves(tree)) == shapes
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(tree))


def test_rows_of_other_parts_stay_zero_in_training():
    """Zeros where a row of the fused projection has no part in a column get no gradient."""
    weight = dict(adapters_in(whole(OPT, ONLY)[1]))["layers.0.qkv_ED"]
    rows = np.tile(np.repeat([0, 1, 2], weight.rows), OPT.num_kv_heads)
    foreign = rows[:, None] != np.repeat([0, 1, 2], weight.ranks)[None]
    state, _, before, _ = trained_twice(ONLY)
    found, start = (
        np.asarray(dict(adapters_in(tree))["layers.0.qkv_ED"].side_FA, np.float32)
        for tree in (state.params, before)
    )
    assert (found[~foreign] != start[~foreign]).any()
    np.testing.assert_array_equal(found[foreign], start[foreign])


def test_dropout_is_drawn_by_seed_and_changes_what_is_learned():
    dropped = replace(ONLY, dropout=0.5)
    runs = [trained_twice(dropped, seed) for seed in (0, 1)] + [trained_twice(ONLY)]
    leaves = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(r[0].params)]) for r in runs]
    for one, other in ((0, 1), (0, 2)):
        assert (leaves[one] != leaves[other]).mean() > 0.1


def low_rank(rate: float) -> Any:
    """One adapter, its input in 32 equal rows, and a linear loss."""
    rng = np.random.default_rng(1)
    side, core = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 2), (2, 16)))
    weight = Adapted(base_FD=None, side_FA=side, core_AD=core, rate=rate)
    return weight, {"x": jnp.ones((32, 16))}


def low_rank_loss(weight: Any, batch: Any) -> Any:
    return jnp.square(add_up(batch["x"], weight)).mean(), {}


def num_rows(batch: Any) -> jax.Array:
    return jnp.float32(batch["x"].shape[0])


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_second_micro_batch_has_another_mask(rate):
    """Both halves of a batch are alike: with one mask their mean would be the gradient of one."""
    weight, batch = low_rank(rate)
    half = {"x": batch["x"][:16]}
    both, one = (
        gradients(low_rank_loss, weight, rows, num_rows, parts, key=jax.random.key(3))[0]
        for rows, parts in ((batch, 2), (half, 1))
    )
    assert np.allclose(both.core_AD, one.core_AD, rtol=1e-5) == (rate == 0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_every_step_has_another_mask_a_skipped_one_too(rate):
    weight, batch = low_rank(rate)
    still = optax.sgd(0.0)
    losses = [
        train_step(
            replace(create_state(weight, still), step=jnp.int32(step), skipped=jnp.int32(skipped)),
            batch, None, jax.random.key(3),
            loss_fn=low_rank_loss, weight_fn=num_rows, optimizer=still, num_parts=1,
        )[1]["loss"]
        for step, skipped in ((0, 0), (1, 0), (1, 1))
    ]  # fmt: skip
    assert len({float(loss) for loss in losses}) == (1 if rate == 0 else 3)


SAMPLING = SamplingConfig(max_new_tokens=5)


def answers(cfg: Any, mesh_name: str, inference_tp: int, *, merge: bool | None) -> Any:
    """A rollout with adapters (merged in the program or not), or with weights merged in NumPy."""
    mesh = make_mesh(parse_mesh(mesh_name), inference_tp)
    engine = HybridEngine(cfg, mesh, (2,), merge_adapters=bool(merge))
    specs, values = whole(cfg, ONLY)
    if merge is None:
        specs, values = param_specs(cfg), truth.merge(values)
    params = put_params(values, specs, engine.store)
    batch: PromptBatch = prompts()
    return to_numpy(engine.generate(params, batch, SAMPLING, key=jax.random.key(5)))


@pytest.mark.parametrize(
    ("cfg", "mesh", "inference_tp", "merge"),
    [
        (OPT, "1x1", 1, False),
        (OPT, "4x2", 4, False),
        (OPT, "4x2", 4, True),
        (LLAMA, "8x1", 1, False),
    ],
)
def test_generation_with_adapters_is_generation_with_merged_weights(cfg, mesh, inference_tp, merge):
    expected = answers(cfg, "1x1", 1, merge=None)
    found = answers(cfg, mesh, inference_tp, merge=merge)
    np.testing.assert_array_equal(found.tokens_BR, expected.tokens_BR)
    np.testing.assert_allclose(found.logprobs_BR, expected.logprobs_BR, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merge", [False, True])
def test_a_pinned_copy_has_its_adapters_and_gives_the_same_answers(merge):
    mesh = make_mesh(parse_mesh("4x2"), 4)
    engine = HybridEngine(OPT, mesh, (2,), merge_adapters=merge)
    specs, values = whole(OPT, ONLY)
    params = put_params(values, specs, engine.store)
    pinned = engine.pin(params)
    assert any(adapters_in(pinned)) != merge
    if merge:
        placed = jax.tree.map(lambda leaf: leaf.sharding, pinned)
        assert placed == shardings(param_specs(OPT), engine.rollout)
    one, other = (
        engine.generate(p, prompts(), SAMPLING, key=jax.random.key(5)) for p in (params, pinned)
    )
    jax.tree.map(np.testing.assert_array_equal, to_numpy(one), to_numpy(other))


R = 4


def experience() -> Experience:
    rng = np.random.default_rng(5)
    lengths = np.array([4, 3, 1, 2, 4, 4, 2, 1], np.int32)
    zeros = np.zeros((8, R), np.float32)
    arrays: dict[str, Any] = {
        "tokens_BT": rng.integers(3, 99, (8, P + R)).astype(np.int32),
        "prompt_lengths_B": PROMPT_LENGTHS, "response_lengths_B": lengths,
        "logprobs_BR": zeros - 5, "ref_logprobs_BR": zeros, "values_BR": zeros,
        "advantages_BR": rng.normal(size=(8, R)).astype(np.float32), "returns_BR": zeros + 1,
        "mask_BR": np.arange(R) < lengths[:, None], "scores_B": zeros[:, 0],
        "valid_B": np.ones(8, np.float32),
    }  # fmt: skip
    return Experience(**arrays)


def test_a_ppo_update_moves_adapters_of_actor_and_critic_on_a_mesh():
    """8x1, dropout on; the critic's head trains with its adapters."""
    mesh = make_mesh(parse_mesh("8x1"), 8)
    lora = replace(ONLY, dropout=0.1)
    actor, critic = parts(OPT, lora, mesh), parts(OPT, lora, mesh, scalar=True)
    before = to_numpy((actor, critic))
    config = OptimizerConfig(RATE, schedule="constant")
    optimizers: Any = tuple(
        make_optimizer(config, specs, 10, adapter_rate=1e-2) for _, specs, _ in (actor, critic)
    )
    place = ModelOnMesh(OPT, compute_layout(OPT, mesh))
    settings = UpdateSettings(
        temperature=1.0, clip_range=0.2, value_clip_range=0.2, value_coef=0.1, entropy_coef=0.0,
        target_kl=None, num_parts=1, remat="full",
    )  # fmt: skip
    program = jax.jit(
        partial(ppo_update, actor_place=place, critic_place=place, optimizers=optimizers,
                settings=settings),
        donate_argnums=(0, 1),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        states = [
            create_state(trained, optimizer)
            for (trained, _, _), optimizer in zip((actor, critic), optimizers, strict=True)
        ]
        new_actor, new_critic, _, metrics = program(
            *states, put_batch(experience(), place.layout), np.arange(8, dtype=np.int32),
            jnp.bool_(False), frozen=(actor[2], critic[2]), key=jax.random.key(1),
        )  # fmt: skip
    assert metrics["val/skipped"] == 0
    for state, (_, _, frozen), (trained_before, _, frozen_before) in zip(
        (new_actor, new_critic), (actor, critic), before, strict=True
    ):
        state: TrainState
        jax.tree.map(np.testing.assert_array_equal, to_numpy(frozen), frozen_before)
        moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), state.params, trained_before)
        assert all(jax.tree.leaves(moved))
        assert len(jax.tree.leaves(combine(state.params, frozen))) > len(jax.tree.leaves(moved))
    assert np.abs(new_critic.params.head_W - before[1][0].head_W).max() > 0
