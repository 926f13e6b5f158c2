"""Every recipe's programs can be traced at its true widths and batches on the mesh it assumes.

Nothing is compiled and no weights are read: shapes and shardings alone, in which a size that does
not divide, a batch that does not fit or a layout that does not mix is an error. Layers of a model
are alike, so two of them stand for all.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh

from meshes.layout import Layout, MeshShape, abstract_mesh, make_mesh, parse_mesh
from rlhf_jax.data.batches import PairBatch, PromptBatch, TextBatch
from rlhf_jax.engine.ema import start_ema
from rlhf_jax.engine.generate import Decoding, generate
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.ppo_step import Scorers
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.engine.step import train_step
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.models.families import SIZES
from rlhf_jax.models.params import compute_layout, store_layout
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.recipes.catalog import BY_DEPLOYMENT, RECIPES
from rlhf_jax.recipes.deepspeed_chat import with_deepspeed_rules
from rlhf_jax.stages.checks import check_batches
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.dpo import dpo_batch_loss, with_reference
from rlhf_jax.stages.dpo import num_pairs as num_dpo_pairs
from rlhf_jax.stages.fit_remat import fit_remat
from rlhf_jax.stages.inference_tp import choose_inference_tp
from rlhf_jax.stages.memory_plan import Models
from rlhf_jax.stages.ppo import Programs
from rlhf_jax.stages.reward import num_pairs, pair_batch_loss
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.roles import Roles, load_roles
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss
from rlhf_jax.stages.trainable import Trainable, load_frozen, load_trainable

MULTI_NODE = tuple(BY_DEPLOYMENT["multi_node"].values())
SMALL = ("quickstart", "smollm2-hh", "smollm2-gsm8k", *BY_DEPLOYMENT["single_gpu"].values())
PLACES = [
    *((name, "1x1") for name in SMALL),
    *((name, "8x1") for name in RECIPES if name not in SMALL + MULTI_NODE),
    *((name, "64x1") for name in MULTI_NODE),
    ("opt-66b-multi-node", "8x8x1"),
    ("opt-66b-multi-node", "8x8"),
]
"""Every recipe with the mesh that it assumes, and with others of as many devices."""


@dataclass(frozen=True)
class Traced:
    """What stages need of a run, on devices that do not exist."""

    cfg: TrainConfig
    mesh: AbstractMesh | Mesh
    dtype: Any
    actor: Pretrained
    reward: Pretrained

    def key(self, step: int, purpose: str) -> jax.Array:
        del step, purpose
        return jax.random.key(0)

    @property
    def run(self) -> Run:
        return cast(Run, self)


def model(name: str) -> Pretrained:
    """A published model's sizes, with two layers and random weights."""
    if name == QUICKSTART:
        return find_pretrained(name)
    cfg = replace(SIZES[name], num_layers=2)
    return Pretrained(name, cfg, cast(Any, None), None, None)


def trace_of(cfg: TrainConfig, mesh: str) -> tuple[Traced, MeshShape]:
    actor, shape = model(cfg.actor_model), parse_mesh(mesh)
    inference_tp = choose_inference_tp(cfg, Models(actor.cfg), shape, "cpu", None)
    few = shape.num_devices <= jax.device_count()
    where = (make_mesh if few else abstract_mesh)(shape, inference_tp)
    return Traced(cfg, where, jnp.dtype(cfg.dtype), actor, model(cfg.reward_model)), shape


def rows(layout: Layout, *shape: int, dtype: Any = jnp.int32) -> Any:
    """An array with its rows over the batch axis."""
    logical = ("batch", *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*logical))


def texts(layout: Layout, size: int, length: int) -> TextBatch:
    one, valid = rows(layout, size), rows(layout, size, dtype=jnp.float32)
    return TextBatch(rows(layout, size, length), one, one, valid)


def pairs(layout: Layout, size: int, length: int) -> PairBatch:
    text = texts(layout, size, length)
    return PairBatch(text, text, rows(layout, size, dtype=jnp.float32))


def loaded(traced: Traced, base: Pretrained, lora: Any, *, scalar: bool) -> tuple[Trainable, Any]:
    """A model that is about to train, and its frozen reference, as shapes."""
    store, seen = store_layout(base.cfg, cast(Any, traced.mesh)), []

    def load() -> Any:
        key = traced.key(0, "init")
        start = load_trainable(base, lora, store, traced.dtype, scalar=scalar, key=key)
        seen.append(start)
        reference = load_frozen(
            traced.run, base, start, offload=False, dtype=None, scalar=scalar, key=key
        )
        return start.params, reference

    params, reference = jax.eval_shape(load)
    return replace(seen[0], params=params), reference


def trace_step(
    traced: Traced, start: Trainable, cfg: Any, loss: Any, weight: Any, batch: Any
) -> None:
    """One update of a supervised stage: it keeps the state's shapes and shardings."""
    optimizer = start.optimizer(cfg.optimizer, 100)
    state = jax.eval_shape(partial(create_state, optimizer=optimizer), start.trained)
    step = partial(
        train_step,
        loss_fn=loss,
        weight_fn=weight,
        optimizer=optimizer,
        num_parts=cfg.gradient_accumulation_steps,
    )
    after, metrics = jax.eval_shape(step, state, batch, start.frozen, None)
    check_same(state, after)
    assert metrics["loss"].shape == ()


def check_same(before: TrainState, after: TrainState) -> None:
    """Donated buffers can be written again: equal shapes, dtypes and shardings."""
    types = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (before, after)
    ]
    assert types[0] == types[1]
    specs = [
        jax.tree.map(lambda leaf: leaf.sharding.spec, state.params) for state in (before, after)
    ]
    assert specs[0] == specs[1]


def trace_sft(traced: Traced) -> None:
    cfg, base = traced.cfg.sft, traced.actor
    layout = compute_layout(base.cfg, cast(Any, traced.mesh))
    start, _ = loaded(traced, base, cfg.lora, scalar=False)
    loss = partial(sft_batch_loss, cfg=cfg, model=base.cfg, layout=layout)
    weight = partial(num_predictions, loss_on=cfg.loss_on)
    trace_step(traced, start, cfg, loss, weight, texts(layout, cfg.batch_size, cfg.max_seq_len))


def trace_reward(traced: Traced) -> None:
    cfg, base = traced.cfg.reward, traced.reward
    layout = compute_layout(base.cfg, cast(Any, traced.mesh))
    start, _ = loaded(traced, base, cfg.lora, scalar=True)
    loss = partial(pair_batch_loss, cfg=cfg, model=base.cfg, layout=layout)
    trace_step(traced, start, cfg, loss, num_pairs, pairs(layout, cfg.batch_size, cfg.max_seq_len))


def trace_dpo(traced: Traced) -> None:
    cfg, base = traced.cfg.dpo, traced.actor
    layout = compute_layout(base.cfg, cast(Any, traced.mesh))
    place = {"model": ModelOnMesh(base.cfg, layout), "num_answer": cfg.max_seq_len // 2}
    start, reference = loaded(traced, base, cfg.lora, scalar=False)
    loss = partial(dpo_batch_loss, cfg=cfg, **place)
    scored = jax.eval_shape(
        partial(with_reference, **place),
        reference,
        pairs(layout, cfg.batch_size, cfg.max_seq_len),
    )
    trace_step(traced, start, cfg, loss, num_dpo_pairs, scored)


def trace_ppo(traced: Traced) -> None:
    """Roles, answers, experience, one update of actor and critic, and the moving average."""
    cfg, actor = traced.cfg.ppo, traced.actor
    plan, found = RewardPlan((), traced.reward, False, traced.reward), []

    def load() -> Roles:
        roles, kept = load_roles(traced.run, actor, plan, 100)
        found.append(kept)
        return roles

    roles = jax.eval_shape(load)
    engine = HybridEngine(
        actor.cfg, cast(Any, traced.mesh), actor.cfg.stop_ids, merge_adapters=cfg.merge_lora
    )
    asked = (cfg.batch_size, cfg.max_prompt_seq_len)
    engine.check_batch(asked, cfg.sampling)

    def prompts(layout: Layout) -> PromptBatch:
        one = rows(layout, cfg.batch_size)
        return PromptBatch(
            rows(layout, *asked), one, one, rows(layout, cfg.batch_size, dtype=jnp.float32)
        )

    decoding = Decoding(
        actor.cfg, engine.rollout, cfg.sampling, engine.stop_ids, engine.merge_adapters
    )
    answer = partial(generate, decoding=decoding)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rollout = jax.eval_shape(answer, roles.policy, prompts(engine.rollout), key=key)
    assert rollout.tokens_BR.shape == (cfg.batch_size, cfg.max_answer_seq_len)
    programs = Programs.create(replace(cfg, standardize_score=False), found[0], plan)
    scorers = Scorers(roles.policy, roles.reference, roles.value_model, roles.reward)
    experience, _, _ = jax.eval_shape(
        programs.score, scorers, prompts(engine.compute), rollout, None, Control(None, None)
    )
    chosen = jax.ShapeDtypeStruct((cfg.rows_per_step,), jnp.int32)
    stopped = jax.ShapeDtypeStruct((), bool)
    after, critic, _, _ = jax.eval_shape(
        programs.update, roles.actor, roles.critic, experience, chosen, stopped, None,
        frozen=roles.frozen, key=roles.dropout_key,
    )  # fmt: skip
    check_same(roles.actor, after)
    check_same(roles.critic, critic)
    if cfg.ema.enable:
        average = jax.eval_shape(start_ema, roles.actor)
        assert jax.tree.structure(average.weights) == jax.tree.structure(roles.actor.params)


def use_mesh(mesh: AbstractMesh | Mesh) -> Any:
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)


STEPS: dict[StageName, Any] = {
    "sft": trace_sft,
    "reward": trace_reward,
    "ppo": trace_ppo,
    "dpo": trace_dpo,
}


def trace(cfg: TrainConfig, mesh: str) -> None:
    for stage in STEPS:
        cfg = fit_remat(cfg, stage, cast(Any, None), cast(Any, None), limit=None)
    traced, shape = trace_of(cfg, mesh)
    check_batches(cfg, shape)
    check_batches(replace(cfg, step=("dpo",)), shape)
    with use_mesh(traced.mesh):
        for step in STEPS.values():
            step(traced)


@pytest.mark.parametrize(("recipe", "mesh"), PLACES)
def test_every_program_of_a_recipe_traces(recipe: str, mesh: str) -> None:
    trace(RECIPES[recipe](), mesh)


def test_deepspeeds_rules_trace_with_adapters_and_tensor_parallel_decoding() -> None:
    trace(with_deepspeed_rules(RECIPES["opt-13b-single-node"]()), "8x1")


def test_a_recipe_that_does_not_fit_is_noticed() -> None:
    """The trace is no formality: rows, prompts and shards that do not fit are errors."""
    base = RECIPES["opt-13b-single-node"]()
    with pytest.raises(ValueError, match=r"gives parts of 12 rows"):
        trace(replace(base, sft=replace(base.sft, batch_size=12)), "8x1")
    with pytest.raises(ValueError, match="the model has 2048 positions"):
        trace(replace(base, ppo=replace(base.ppo, max_answer_seq_len=2000)), "8x1")
    with pytest.raises(ValueError, match="inference-tp-size=3 does not fit"):
        trace(replace(base, inference_tp_size=3), "8x1")
