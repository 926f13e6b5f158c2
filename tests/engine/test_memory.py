"""Predicted bytes against what XLA's own analysis says of the compiled programs.

Arguments are compared on simulated CPU devices. What a program holds beside them depends on the
compiler's backend (the one for CPUs makes float32 copies, and matrices of attention scores), so
growth is compared there, and whole programs where JAX's CUDA plugin is installed: it compiles for
an H200 that is not attached.
"""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.data.batches import PromptBatch, TextBatch
from rlhf_jax.engine.generate import Decoding, for_decoding, generate
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.memory import ModelMemory, Rows, leaf_bytes
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.row_passes import ModelOnMesh, answer_logprobs
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.slots import generate_in_slots
from rlhf_jax.engine.state import create_state
from rlhf_jax.engine.step import train_step
from rlhf_jax.models.decoder import Remat, forward, prefill
from rlhf_jax.models.lora import LoRAConfig, split, trains
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import abstract_params
from rlhf_jax.models.scoring import score_tokens
from tests.models.cases import OPT

MODEL = replace(
    OPT, width=256, embed_width=256, head_size=32, mlp_width=1024, num_layers=2, vocab_size=2000
)
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
B, T = 64, 32
PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
TARGET = Path(__file__).parents[1] / "kernels" / "h200_target_config.txtpb"


def array(layout: Layout, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
    axes = ("batch", *(None,) * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))


def train_program(model: ModelMemory, rows: Rows, remat: Remat, num_parts: int) -> Any:
    """The memory of a train step on log-probabilities, as XLA sees it."""
    assert model.lora is not None
    cfg, layout, lora = model.cfg, model.compute, model.lora
    moving, still = split(model.specs, trains(model.specs, lora))
    optimizer = make_optimizer(OptimizerConfig(1e-5), moving, 100)

    def loss(params: Any, batch: Any) -> Any:
        hidden = forward(params, batch.tokens_BT, cfg, layout, remat=remat)
        scored = hidden[:, :-1], batch.tokens_BT[:, 1:]
        logprobs, _ = score_tokens(params, *scored, cfg, layout, remat=remat)
        return -logprobs.mean(), {}

    step = partial(
        train_step, loss_fn=loss, weight_fn=lambda batch: batch.valid_B.sum(),
        optimizer=optimizer, num_parts=num_parts,
    )  # fmt: skip
    counts = array(layout, (rows.rows,))
    batch = TextBatch(
        array(layout, (rows.rows, rows.length)), counts, counts,
        array(layout, (rows.rows,), jnp.float32),
    )  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct((), key.dtype, sharding=layout.sharding())
    with jax.set_mesh(model.store.mesh):
        params, frozen = (abstract_params(s, model.store, model.dtype) for s in (moving, still))
        state = jax.eval_shape(lambda params: create_state(params, optimizer), params)
        inputs = state, batch, frozen, key if lora.drops else None
        program = jax.jit(step, donate_argnums=0).lower(*inputs).compile()
    return program.memory_analysis()


def trained(mesh: Any, cfg=MODEL, dtype=FLOAT32, *, fused: bool = False) -> ModelMemory:
    return ModelMemory(cfg, mesh, dtype, LoRAConfig(), scalar=False, fused_attention=fused)


def mesh_of(name: str) -> jax.sharding.Mesh:
    shape = parse_mesh(name)
    return make_mesh(shape, shape.tensor)


@pytest.mark.parametrize("mesh", ["1x1", "8x1", "4x2"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_state_is_what_the_compiled_train_step_is_given(mesh: str, dtype: Any) -> None:
    """To a thousandth, which the batch is: weights, masters and moments are exact."""
    model = trained(mesh_of(mesh), dtype=dtype)
    found = train_program(model, Rows(B, T, T - 1), "full", 1)
    predicted = model.weights() + model.masters() + model.moments()
    assert found.argument_size_in_bytes == pytest.approx(predicted, rel=5e-3)
    assert found.alias_size_in_bytes == pytest.approx(predicted, rel=5e-3)


def test_layers_add_their_gradients_and_inputs() -> None:
    """Two more layers, accumulated over parts: within 20 %."""
    rows = Rows(B, T, T - 1)
    few = trained(mesh_of("1x1"))
    many = replace(few, cfg=replace(MODEL, num_layers=4))
    predicted, found = (
        after - before
        for before, after in (
            (few.training(rows, "full", 4), many.training(rows, "full", 4)),
            tuple(
                train_program(model, rows, "full", 4).temp_size_in_bytes for model in (few, many)
            ),
        )
    )
    assert found == pytest.approx(predicted, rel=0.2)


def generate_program(
    model: ModelMemory, rows: Rows, slots: int | None = None, **narrow: Any
) -> Any:
    """The memory of a generation, as XLA sees it."""
    layout, prompt = model.rollout, rows.length - rows.counted
    sampling = SamplingConfig(max_new_tokens=rows.counted)
    decoding = Decoding(model.cfg, layout, sampling, (), **narrow)
    counts = array(layout, (rows.rows,))
    prompts = PromptBatch(
        array(layout, (rows.rows, prompt)), counts, counts,
        array(layout, (rows.rows,), jnp.float32),
    )  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct((), key.dtype, sharding=layout.sharding())
    with jax.set_mesh(model.store.mesh):
        params = abstract_params(model.specs, model.store, model.dtype)
        run = generate if slots is None else partial(generate_in_slots, num_slots=slots)
        program = jax.jit(lambda p, b, k: run(p, b, decoding=decoding, key=k))
        return program.lower(params, prompts, key).compile().memory_analysis()


@pytest.fixture(scope="module")
def h200() -> jax.sharding.Mesh:
    """One H200 that is not attached."""
    if not PLUGIN:
        pytest.skip("no CUDA plugin of JAX is installed")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    return make_mesh(parse_mesh("1x1"), 1, topology.devices)


REAL = replace(SIZES["facebook/opt-1.3b"], num_layers=3)
ROWS = Rows(32, 512, 256)
GPU = 0.1
"""Of arguments and temporary memory together, as docs/memory.md says."""


@pytest.mark.parametrize(
    ("remat", "num_parts"),
    [("full", 1), ("full", 4), ("matrices", 1), ("mlp", 1), ("dots", 2), ("none", 1)],
)
def test_a_train_step_on_a_gpu(h200: Any, remat: Remat, num_parts: int) -> None:
    model, rows = trained(h200, REAL, BFLOAT16, fused=True), replace(ROWS, counted=511)
    found = train_program(model, rows, remat, num_parts)
    held = model.weights() + model.masters() + model.moments()
    predicted = held + model.training(rows, remat, num_parts)
    assert found.argument_size_in_bytes + found.temp_size_in_bytes == pytest.approx(
        predicted, rel=GPU
    )


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_train_on_a_gpu(h200: Any, remat: Remat, dropout: float) -> None:
    lora = LoRAConfig(dim=16, only=True, dropout=dropout)
    model = replace(trained(h200, REAL, BFLOAT16, fused=True), lora=lora)
    rows = Rows(16, 512, 511)
    found = train_program(model, rows, remat, 1)
    state = model.weights() + model.masters() + model.moments()
    predicted = state + model.training(rows, remat, 1)
    both = found.argument_size_in_bytes + found.temp_size_in_bytes
    assert predicted == pytest.approx(both, rel=GPU)


def test_generation_on_a_gpu(h200: Any) -> None:
    model = trained(h200, REAL, BFLOAT16, fused=True)
    found = generate_program(model, ROWS)
    predicted = model.weights() + model.generating(ROWS)
    assert found.argument_size_in_bytes + found.temp_size_in_bytes == pytest.approx(
        predicted, rel=GPU
    )


@pytest.mark.parametrize("slots", [32, 128])
def test_generation_in_slots_on_a_gpu(h200: Any, slots: int) -> None:
    model, rows = trained(h200, REAL, BFLOAT16, fused=True), replace(ROWS, rows=512)
    found = generate_program(model, rows, slots)
    predicted = model.weights() + model.generating(rows, slots=slots)
    assert found.argument_size_in_bytes + found.temp_size_in_bytes == pytest.approx(
        predicted, rel=GPU
    )


def test_scoring_on_a_gpu(h200: Any) -> None:
    model = trained(h200, REAL, BFLOAT16, fused=True)
    place = ModelOnMesh(model.cfg, model.compute)
    tokens = array(model.compute, (ROWS.rows, ROWS.length))
    with jax.set_mesh(h200):
        params = abstract_params(model.specs, model.store, BFLOAT16)
        program = jax.jit(lambda p, t, n: answer_logprobs(p, t, n, ROWS.counted, place, 1.0)[0])
        found = program.lower(params, tokens, array(model.compute, (ROWS.rows,))).compile()
    memory = found.memory_analysis()
    assert memory is not None
    predicted = model.weights() + model.scoring(ROWS)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes == pytest.approx(
        predicted, rel=GPU
    )


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_layers_add_cache_and_copy_to_generation(mesh: str) -> None:
    """Two more layers: their cache, and on 8x1 their gathered weights. Within 20 %."""
    few = trained(mesh_of(mesh))
    many = replace(few, cfg=replace(MODEL, num_layers=4))
    rows = Rows(B, 32, 24)
    predicted = many.generating(rows) - few.generating(rows)
    found = [generate_program(model, rows).temp_size_in_bytes for model in (few, many)]
    assert found[1] - found[0] == pytest.approx(predicted, rel=0.2)


def test_layers_add_the_cache_of_slots_and_not_of_the_batch() -> None:
    """Two more layers, a quarter of the rows. Within 20 %."""
    few, rows, slots = trained(mesh_of("1x1")), Rows(B, 32, 24), B // 4
    many = replace(few, cfg=replace(MODEL, num_layers=4))
    predicted = many.generating(rows, slots=slots) - few.generating(rows, slots=slots)
    assert predicted == (many.cache(rows) - few.cache(rows)) / 4
    found = [generate_program(model, rows, slots).temp_size_in_bytes for model in (few, many)]
    assert found[1] - found[0] == pytest.approx(predicted, rel=0.2)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_rounded_copy_and_cache_are_as_many_bytes_as_their_arrays(mesh: Any, kind: Narrow) -> None:
    """Shard by shard, of the arrays that a rollout makes: matrices, their scales, and the rest of
    the weights where they are gathered.
    """
    mesh = mesh_of(mesh)
    model, rows = replace(trained(mesh), dtype=BFLOAT16), Rows(B, 32, 24)
    layout, cfg = model.rollout, model.cfg
    decoding = Decoding(cfg, layout, SamplingConfig(), (), weights=kind)

    def run(params: Any, tokens: jax.Array) -> Any:
        params = for_decoding(params, decoding)
        return params, prefill(params, tokens, rows.length, cfg, layout, kind)[1]

    with jax.set_mesh(mesh):
        params = abstract_params(model.specs, model.store, BFLOAT16)
        copy, kv_cache = jax.eval_shape(run, params, array(layout, (rows.rows, 8)))

    def on_one_device(*leaves: Any) -> int:
        sizes = [np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
        return int(sum(sizes))

    rounded = [leaf for leaf in jax.tree.leaves(copy) if leaf.dtype.itemsize == 1]
    scales = [leaf for leaf in jax.tree.leaves(copy) if leaf.dtype == FLOAT32]
    assert (len(rounded), len(scales)) == (4 * cfg.num_layers,) * 2
    gathered = model.rollout_copy()
    plain = sum(
        leaf_bytes(layout, spec, 2)
        for layer in model.specs.layers
        for spec in (layer.qkv_ED, layer.out_ED, layer.up_FD, layer.down_FD)
    )
    rest = gathered - plain if gathered else 0
    assert rest >= 0
    assert model.rollout_copy(kind) == on_one_device(*rounded, *scales) + rest
    assert model.cache(rows, kind) == on_one_device(*jax.tree.leaves(kv_cache))
    more = model.generating(rows, weights=kind, kv_cache=kind) - model.generating(rows)
    assert more < 0.75 * plain - 0.4 * model.cache(rows)


@pytest.mark.parametrize(
    ("mesh", "kind", "merged"),
    [("1x1", "same", False), ("8x1", "int8", False), ("4x2", "same", True), ("1x1", "int8", True)],
)
def test_a_pinned_copy_has_buffers_of_its_own(mesh: Any, kind: Narrow, merged: bool) -> None:
    """All of it, in bytes of one device, also where nothing is gathered."""
    mesh, lora = mesh_of(mesh), LoRAConfig(dim=2)
    model = ModelMemory(OPT, mesh, BFLOAT16, lora, scalar=False, fused_attention=False)
    shapes = abstract_params(model.specs, model.store, BFLOAT16)
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), shapes
        )
    engine = HybridEngine(OPT, mesh, (), merge_adapters=merged, weights=kind)
    held, kept = (
        {
            shard.unsafe_buffer_pointer(): shard.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in [leaf.addressable_shards[0].data]
        }
        for tree in (params, engine.pin(params))
    )
    assert not held.keys() & kept.keys()
    assert model.pinned(kind, merged=merged) == sum(kept.values())


def test_rounded_generation_on_a_gpu(h200: Any) -> None:
    model = trained(h200, REAL, BFLOAT16, fused=True)
    found = generate_program(model, ROWS, weights="int8", kv_cache="int8")
    predicted = model.weights() + model.generating(ROWS, weights="int8", kv_cache="int8")
    assert found.argument_size_in_bytes + found.temp_size_in_bytes == pytest.approx(
        predicted, rel=GPU
    )


def test_adapters_leave_matrices_out_of_the_state() -> None:
    """By hand: two layers whose matrices have rank 4 adapters, and nothing else trains."""
    lora = LoRAConfig(dim=4, only=True)
    model = replace(trained(mesh_of("1x1")), lora=lora, dtype=BFLOAT16)
    width, mlp, qkv = MODEL.width, MODEL.mlp_width, 3 * MODEL.width
    fused = 3 * 4 * (qkv + width)
    adapters = 2 * (fused + 4 * (width + width) + 2 * 4 * (mlp + width))
    assert model.gradients() == 4 * adapters
    assert model.masters() + model.moments() == 12 * adapters
    assert model.weights() == model.plain_weights() + 2 * adapters
    assert model.copied() == 0
    assert np.isclose(model.plain_weights(), 2 * MODEL.num_params(), rtol=0.05)


def test_dropout_keeps_the_inputs_of_adapters_and_what_passed() -> None:
    """A byte a number of all inputs (D, H, D and F = 4 D), and those of the projections that no
    norm has written (H and F).
    """
    plain = replace(trained(mesh_of("1x1"), fused=True), lora=LoRAConfig(dim=4, only=True))
    drops = replace(plain, lora=LoRAConfig(dim=4, only=True, dropout=0.1))
    rows, tokens = Rows(B, T, T - 1), B * T * MODEL.width
    more = {r: drops.kept(rows, r) - plain.kept(rows, r) for r in ("full", "dots", "none")}
    assert more == {"full": 0, "dots": 0, "none": (7 + 5 * 4) * tokens}
    half = LoRAConfig(dim=4, only=True, dropout=0.1, modules=("layers.1.fc2",))
    one = replace(plain, lora=half).kept(rows, "none") - plain.kept(rows, "none")
    assert one == 4 * (1 + 4) * tokens // MODEL.num_layers


def test_a_vocabulary_that_does_not_train_has_no_gradient() -> None:
    rows = Rows(B, T, T - 1)
    alone, beside = (
        replace(trained(mesh_of("1x1")), lora=LoRAConfig(dim=4, only=only))
        for only in (True, False)
    )
    table = 4 * MODEL.padded_vocab * MODEL.embed_width
    assert beside.head_backward(rows, "full") - alone.head_backward(rows, "full") == table
