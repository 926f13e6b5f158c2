"""What XLA makes of generate and of the gradient: memory and collectives, read from the programs.

Nothing runs here. Widths are large against batch and cache, so that weights stand out.
"""

import functools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import reshard_params
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.generate import Decoding, generate
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, adapters_in, combine, split, trains
from rlhf_jax.models.params import abstract_params, is_spec, layer_specs, param_specs
from rlhf_jax.models.quantized import plain_spec
from tests.meshes.compiled import (
    REMATERIALIZED,
    collectives,
    fresh_compiler,
    gathered,
    reduced,
    temporary_bytes,
)
from tests.models.cases import OPT

B, P = 8, 4
MODEL = replace(
    OPT, width=128, embed_width=128, head_size=16, mlp_width=512, num_layers=2, vocab_size=100
)
FLOAT32 = jnp.dtype("float32")


def bytes_of(specs) -> int:
    return sum(4 * math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


LAYER_BYTES = bytes_of(layer_specs(MODEL))
NONE, ADAPTERS = LoRAConfig(), LoRAConfig(dim=2, only=True)
MATRIX_BYTES = sum(4 * math.prod(plain_spec(w.base_FD).shape) for _, w in adapters_in(
    adapted_specs(param_specs(MODEL), MODEL, ADAPTERS)
))  # fmt: skip
WEIGHTS = {"f32[384,128]", "f32[128,128]", "f32[512,128]"}
WINNERS = f"s32[8,4,{B}]"
SIDES, CORES = {"f32[384,6]", "f32[128,2]", "f32[512,2]"}, {"f32[6,128]", "f32[2,128]"}


def engine_on(mesh: str, inference_tp: int, num_layers: int = 2) -> HybridEngine:
    cfg = replace(MODEL, num_layers=num_layers)
    return HybridEngine(cfg, make_mesh(parse_mesh(mesh), inference_tp), (2,))


def specs_of(engine: HybridEngine, lora: LoRAConfig) -> Any:
    return adapted_specs(param_specs(engine.cfg), engine.cfg, lora)


def abstract(engine: HybridEngine, lora: LoRAConfig = NONE):
    return abstract_params(specs_of(engine, lora), engine.store, FLOAT32)


@functools.cache
def generate_on(
    mesh: str, inference_tp: int, *, lora: LoRAConfig = NONE, merge: bool = False
) -> jax.stages.Compiled:
    engine = engine_on(mesh, inference_tp)

    sampling = SamplingConfig(max_new_tokens=4)
    decoding = Decoding(engine.cfg, engine.rollout, sampling, engine.stop_ids, merge)

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        axes = ("batch", *(None,) * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=engine.rollout.sharding(*axes))

    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(engine.mesh):
        prompts = PromptBatch(rows(B, P), rows(B), rows(B), rows(B, dtype=jnp.float32))
        program = jax.jit(partial(generate, decoding=decoding))
        return program.lower(abstract(engine, lora), prompts, key=key).compile()


@functools.cache
def train_on(
    mesh: str, inference_tp: int, num_layers: int, *, grad: bool = True, gather_first: bool = False
) -> jax.stages.Compiled:
    """A loss on hidden states, or its gradient; `gather_first` is what the engine does not do."""
    engine = engine_on(mesh, inference_tp, num_layers)
    cfg, layout = engine.cfg, engine.compute

    def loss(params, tokens):
        if gather_first:
            params = reshard_params(params, param_specs(cfg), layout)
        return jnp.square(forward(params, tokens, cfg, layout, remat="full")).sum()

    tokens = jax.ShapeDtypeStruct((B, P), jnp.int32, sharding=layout.sharding("batch", None))
    with jax.set_mesh(engine.mesh):
        program = jax.jit(jax.grad(loss) if grad else loss)
        return program.lower(abstract(engine), tokens).compile()


@pytest.mark.parametrize(("mesh", "inference_tp"), [("8x1", 8), ("1x8", 8)])
def test_generate_reads_the_updates_own_buffers_where_layouts_agree(mesh, inference_tp):
    """Its temporary memory is below one device's share of one layer: no weight is copied."""
    assert temporary_bytes(generate_on(mesh, inference_tp)) < LAYER_BYTES / 8


@pytest.mark.parametrize(("mesh", "inference_tp"), [("8x1", 8), ("1x8", 8)])
def test_generate_gathers_winners_and_no_weight_where_layouts_agree(mesh, inference_tp):
    """Of each device's columns the likeliest token of every row: no logits, no weight."""
    program = generate_on(mesh, inference_tp)
    assert gathered(program) == {WINNERS}
    assert set(collectives(program)) == {"all-gather", "all-reduce"}


def test_generate_holds_one_gathered_copy_where_they_do_not():
    """The control for the two tests above: every device decodes alone."""
    program = generate_on("8x1", 1)
    assert temporary_bytes(program) > MODEL.num_layers * LAYER_BYTES
    sharded = sum(any(s.axes) for s in jax.tree.leaves(param_specs(MODEL), is_leaf=is_spec))
    assert collectives(program)["all-gather"] == sharded
    assert f"f32[{MODEL.padded_mlp},{MODEL.width}]" in gathered(program)


def test_adapters_in_decoding_cost_their_small_factors_and_no_weight():
    program = generate_on("8x1", 8, lora=ADAPTERS)
    assert temporary_bytes(program) < LAYER_BYTES / 8
    assert gathered(program) == CORES | {WINNERS}


def test_merged_they_cost_one_copy_of_the_shards():
    """Merged where they lie: on every device its own part, which nothing gathers."""
    program = generate_on("8x1", 8, lora=ADAPTERS, merge=True)
    assert 1 <= temporary_bytes(program) / (MATRIX_BYTES / 8) < 1.5
    assert gathered(program) == CORES | {WINNERS}


def test_where_every_device_decodes_alone_merged_weights_are_gathered_and_no_factor_with_them():
    beside, merged = (generate_on("8x1", 1, lora=ADAPTERS, merge=m) for m in (False, True))
    assert gathered(beside) >= WEIGHTS | SIDES | CORES
    assert gathered(merged) >= WEIGHTS | CORES
    assert not gathered(merged) & SIDES


def num_gathers(num_layers: int) -> int:
    """One for each sharded parameter of a layer, one for the embedding."""
    in_layer = sum(any(s.axes) for s in jax.tree.leaves(layer_specs(MODEL), is_leaf=is_spec))
    assert in_layer == 6
    return num_layers * in_layer + 1


def test_a_forward_pass_gathers_every_parameter_once():
    found = collectives(train_on("8x1", 1, 2, grad=False))
    assert found["all-gather"] == num_gathers(2)
    assert set(found) <= {"all-gather", "all-reduce"}


def test_a_rematerialised_gradient_gathers_layers_twice():
    """Once on the way up and once on the way down; the embedding stays."""
    found = collectives(train_on("8x1", 1, 2))
    assert found["all-gather"] == 2 * num_gathers(2) - 1
    assert set(found) <= {"all-gather", "all-reduce", "reduce-scatter"}


@functools.cache
def train_adapters_on(mesh: str, inference_tp: int) -> jax.stages.Compiled:
    """The gradient of the adapters of a model, whose weights are frozen."""
    engine = engine_on(mesh, inference_tp)
    cfg, layout, specs = engine.cfg, engine.compute, specs_of(engine, ADAPTERS)

    def loss(trained, frozen, tokens):
        params = combine(trained, frozen)
        return jnp.square(forward(params, tokens, cfg, layout, remat="full")).sum()

    tokens = jax.ShapeDtypeStruct((B, P), jnp.int32, sharding=layout.sharding("batch", None))
    parts = split(abstract(engine, ADAPTERS), trains(specs, ADAPTERS))
    with jax.set_mesh(engine.mesh):
        return jax.jit(jax.grad(loss)).lower(*parts, tokens).compile()


def test_training_adapters_sums_their_gradients_and_no_weights():
    """On 8x1; where everything trains, those of weights are summed: the control."""
    program = train_adapters_on("8x1", 1)
    assert gathered(program) >= WEIGHTS | SIDES | CORES
    assert reduced(program) & (SIDES | CORES)
    assert not reduced(program) & WEIGHTS
    assert reduced(train_on("8x1", 1, 2)) >= WEIGHTS


def test_a_device_stores_its_share_of_every_factor():
    engine = engine_on("4x2", 4)
    for _, weight in adapters_in(abstract(engine, ADAPTERS)):
        for factor in (weight.side_FA, weight.core_AD):
            shard = factor.sharding.shard_shape(factor.shape)
            assert math.prod(shard) == math.prod(factor.shape) / 8


def test_tensor_parallelism_alone_gathers_no_parameter():
    found = collectives(train_on("1x8", 8, 2))
    assert "all-gather" not in found
    assert found["all-reduce"] >= 4 * MODEL.num_layers  # two a layer on each way


def test_gathered_weights_do_not_outlive_their_layer():
    """Two more layers cost less than a tenth of their weights: the gather is in the checkpoint."""
    two, four = (temporary_bytes(train_on("8x1", 1, n)) for n in (2, 4))
    assert four - two < 2 * LAYER_BYTES / 10


def test_gathered_outside_the_checkpoint_they_would():
    """The control for the test above."""
    two, four = (temporary_bytes(train_on("8x1", 1, n, gather_first=True)) for n in (2, 4))
    assert four - two > 1.9 * LAYER_BYTES


def test_no_layout_is_reached_by_replicating_an_array(capfd):
    """With all axes in use, in generate and in the gradient; test_reshard has the control."""
    generate_on.cache_clear()
    with fresh_compiler():
        generate_on("4x2", 4)
        train_on("4x2", 4, 1)
        train_on("2x2x2", 2, 1)
        for merge in (False, True):
            generate_on("4x2", 4, lora=ADAPTERS, merge=merge)
        train_adapters_on("4x2", 4)
        train_adapters_on("2x2x2", 2)
    assert REMATERIALIZED not in capfd.readouterr().err


def test_sizes_under_test_make_weights_stand_out():
    cache = 2 * B * 8 * 16 * (P + 4) * 4
    assert np.prod((B, P, MODEL.width)) * 4 < LAYER_BYTES / 8
    assert cache < LAYER_BYTES / 8
