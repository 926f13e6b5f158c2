"""Programs over a base in int8, compiled for an H200: nowhere does the whole of it widen."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.data.batches import PromptBatch, TextBatch
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.step import gradients
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, combine, split, trains
from rlhf_jax.models.params import abstract_params, layer_specs, param_specs
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss
from rlhf_jax.stages.supervised_config import SFTConfig
from tests.gpu_programs.programs import BFLOAT16, OPT
from tests.gpu_programs.target import WHY_NOT, Program, compile_for_gpu, mesh_of_h200s

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ROWS, PROMPT, ANSWER = 64, 64, 192
LAYER = sum(
    spec.shape[0] * spec.shape[1] * 2
    for spec in jax.tree.leaves(layer_specs(OPT), is_leaf=lambda n: hasattr(n, "axes"))
    if len(spec.shape) == 2
)
"""Bytes of the matrices of a layer in bfloat16."""


def parts(lora: LoRAConfig) -> tuple[HybridEngine, Any, Any]:
    """An engine on one H200, and what trains and what is frozen of an actor."""
    engine = HybridEngine(OPT, mesh_of_h200s("1x1", 1), (2,))
    specs = adapted_specs(param_specs(OPT), OPT, lora)
    params = abstract_params(specs, engine.store, BFLOAT16)
    return engine, *split(params, trains(specs, lora))


def row(engine: HybridEngine, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    sharding = engine.compute.sharding("batch", *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def generate(lora: LoRAConfig) -> Program:
    """64 rows of 64 + 192 tokens."""
    engine, trained, frozen = parts(lora)
    ints = row(engine, (ROWS,))
    prompts: Any = PromptBatch(
        row(engine, (ROWS, PROMPT)), ints, ints, row(engine, (ROWS,), jnp.float32)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct((), key.dtype, sharding=engine.compute.sharding())
    run = engine._generate(SamplingConfig(max_new_tokens=ANSWER))
    with jax.set_mesh(engine.mesh):
        return compile_for_gpu(run.lower(combine(trained, frozen), prompts, key=key))


def update(lora: LoRAConfig) -> Program:
    """The gradients of 16 rows of 256 tokens in two parts, each layer recomputed."""
    engine, trained, frozen = parts(lora)
    ints = row(engine, (16,))
    batch: Any = TextBatch(row(engine, (16, 256)), ints, ints, row(engine, (16,), jnp.float32))
    loss = partial(sft_batch_loss, cfg=SFTConfig(), model=OPT, layout=engine.compute)
    weight = partial(num_predictions, loss_on="all")

    def step(trained: Any, frozen: Any, batch: Any) -> Any:
        return gradients(loss, trained, batch, weight, 2, frozen=frozen)

    with jax.set_mesh(engine.mesh):
        return compile_for_gpu(jax.jit(step).lower(trained, frozen, batch))


@pytest.mark.parametrize("program", [generate, update])
def test_int8_saves_half_of_the_arguments_and_adds_less_than_a_layer(program) -> None:
    """A copy in bfloat16 that outlives a layer, or that a loop keeps, would be two layers."""
    lora = LoRAConfig(dim=16, only=True)
    wide, narrow = program(lora).memory, program(replace(lora, load_in_8bit=True)).memory
    saved = wide.arguments - narrow.arguments
    assert saved == pytest.approx(OPT.num_layers * LAYER / 2, rel=0.01)
    assert narrow.temporary - wide.temporary < LAYER
