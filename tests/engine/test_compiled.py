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
from rlhf_jax.models.params import abstract_params, is_spec, layer_specs, param_specs
from tests.meshes.compiled import (
    REMATERIALIZED,
    collectives,
    fresh_compiler,
    gathered,
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


def engine_on(mesh: str, inference_tp: int, num_layers: int = 2) -> HybridEngine:
    cfg = replace(MODEL, num_layers=num_layers)
    return HybridEngine(cfg, make_mesh(parse_mesh(mesh), inference_tp), (2,))


def abstract(engine: HybridEngine):
    return abstract_params(param_specs(engine.cfg), engine.store, FLOAT32)


@functools.cache
def generate_on(mesh: str, inference_tp: int) -> jax.stages.Compiled:
    engine = engine_on(mesh, inference_tp)

    sampling = SamplingConfig(max_new_tokens=4)
    decoding = Decoding(engine.cfg, engine.rollout, sampling, engine.stop_ids)

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        axes = ("batch", *(None,) * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=engine.rollout.sharding(*axes))

    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(engine.mesh):
        prompts = PromptBatch(rows(B, P), rows(B), rows(B), rows(B, dtype=jnp.float32))
        program = jax.jit(partial(generate, decoding=decoding))
        return program.lower(abstract(engine), prompts, key=key).compile()


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
def test_generate_gathers_logits_and_no_weight_where_layouts_agree(mesh, inference_tp):
    program = generate_on(mesh, inference_tp)
    assert gathered(program) == {f"f32[{B},{MODEL.padded_vocab}]"}
    assert set(collectives(program)) == {"all-gather", "all-reduce"}


def test_generate_holds_one_gathered_copy_where_they_do_not():
    """The control for the two tests above: every device decodes alone."""
    program = generate_on("8x1", 1)
    assert temporary_bytes(program) > MODEL.num_layers * LAYER_BYTES
    sharded = sum(any(s.axes) for s in jax.tree.leaves(param_specs(MODEL), is_leaf=is_spec))
    assert collectives(program)["all-gather"] == sharded
    assert f"f32[{MODEL.padded_mlp},{MODEL.width}]" in gathered(program)


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
    assert REMATERIALIZED not in capfd.readouterr().err


def test_sizes_under_test_make_weights_stand_out():
    cache = 2 * B * 8 * 16 * (P + 4) * 4
    assert np.prod((B, P, MODEL.width)) * 4 < LAYER_BYTES / 8
    assert cache < LAYER_BYTES / 8
