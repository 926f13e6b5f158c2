"""The checks find what they look for: programs with the faults that ours must not have."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention.api import decode_attention
from tests.gpu_programs import checks
from tests.gpu_programs.target import WHY_NOT, Program, compile_for_gpu, mesh_of_h200s
from tests.gpu_programs.thunks import GRAPH

pytestmark = [
    pytest.mark.gpu_programs,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

B, H, S, K, LAYERS = 8, 16, 256, 64, 2
CACHE = B * H * S * K
BFLOAT16 = jnp.dtype("bfloat16")


def build(function, *shapes, mesh="1x1", donate=(), specs=None, dtype=BFLOAT16) -> Program:
    """`function` of arrays, compiled for H200s; `specs` say how they are sharded."""
    devices = mesh_of_h200s(mesh, 1)
    specs = specs or (P(),) * len(shapes)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(devices, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    with jax.set_mesh(devices):
        return compile_for_gpu(jax.jit(function, donate_argnums=donate).lower(*arrays))


def decode(q_BHK, caches, *, stacked: bool):
    """Tokens that attend to their past, with the caches of the layers in one array or in a list."""

    def token(i, carry):
        q, caches = carry
        positions = jnp.full(B, i, jnp.int32)
        new = []
        for layer in range(LAYERS):
            qkv = jnp.stack([q, q, q], axis=2)
            out, k, v = decode_attention(qkv, positions, *caches[layer])
            new.append((k, v))
            q = q + out
        if stacked:
            return q, jnp.stack([jnp.stack(pair) for pair in new])
        return q, new

    return lax.fori_loop(0, S, token, (q_BHK, caches))


def cache_copies(program: Program) -> list[str]:
    module = program.module
    return checks.copies(
        module, module.body(checks.decode_loop(module)), [CACHE, LAYERS * 2 * CACHE]
    )


def test_a_stacked_cache_is_copied_and_a_list_of_caches_is_not():
    stacked = build(partial(decode, stacked=True), (B, H, K), (LAYERS, 2, B, H, S, K))
    assert cache_copies(stacked)

    def listed(q, *arrays):
        return decode(q, [arrays[:2], arrays[2:]], stacked=False)

    assert cache_copies(build(listed, (B, H, K), *[(B, H, S, K)] * 4)) == []


def test_a_branch_in_the_loop_is_a_second_launch_or_more():
    """A loop within the loop, which no graph holds."""

    def loops(x):
        def outer(carry):
            i, x = carry
            x = lax.while_loop(lambda y: y.sum() > i, lambda y: jnp.sin(jnp.flip(y, 0)) @ y, x)
            x = jnp.cos(x @ x) @ x
            return i + 1, jnp.flip(x @ x, 1) @ x

        return lax.while_loop(lambda carry: carry[0] < 9, outer, (jnp.bfloat16(0), x))

    program = build(loops, (256, 256))
    loop = next(one for one in program.thunks.walk() if one.kind == "kWhile")
    assert checks.graphs(loop.part("body").launches) != {GRAPH: 1}


def test_without_donation_nothing_is_given():
    step = partial(jax.tree.map, lambda x: x * 2)
    kept, given = (build(step, (512, 512), donate=donate) for donate in ((), (0,)))
    assert (kept.module.num_aliased, kept.memory.aliased) == (0, 0)
    assert (given.module.num_aliased, given.memory.aliased) == (1, 2 * 512**2)


def loss_of(attend):
    def loss(x):
        return jnp.square(attend(x, x, x).astype(jnp.float32)).sum()

    return jax.grad(loss)


def test_plain_attention_has_a_matrix_of_scores_and_cudnns_has_not():
    shape = (2, 384, 4, 64)
    plain = build(loss_of(partial(attention, implementation="reference")), shape)
    assert checks.quadratic(plain.module, 384)
    assert checks.attention_calls(plain.module) == []
    fused = build(loss_of(attention), shape)
    assert checks.quadratic(fused.module, 384) == []
    assert len(checks.attention_calls(fused.module)) == 2


def test_logits_of_all_positions_are_found():
    def loss(hidden, unembed):
        logits = jnp.einsum("ND,VD->NV", hidden, unembed, preferred_element_type=jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1).sum()

    program = build(jax.grad(loss, argnums=(0, 1)), (1024, 256), (5120, 256))
    assert checks.logits(program.module, [5120], 512 * 5120)


WEIGHT = (2048, 1024)
SHARDED, WHOLE = P("data", None), P(None, None)


def train(x, w):
    """The gradient of a weight in its own sharding."""

    def loss(w):
        whole = jax.sharding.reshard(w, P(None, None))
        return jnp.square(jnp.einsum("ND,FD->NF", x, whole).astype(jnp.float32)).sum()

    return jax.grad(loss)(w)


def collectives_of(*, weight: P = SHARDED, dtype=BFLOAT16):
    specs = (SHARDED, weight)
    return build(
        train, (4096, 1024), WEIGHT, mesh="8x1", specs=specs, dtype=dtype
    ).module.collectives()


def test_gathers_in_bfloat16_and_scattered_gradients():
    """The control of the controls: what the engine does."""
    found = collectives_of()
    assert [str(array) for array in checks.large(found, "all-gather")] == ["bf16[2048,1024]"]
    assert [str(array) for array in checks.large(found, "reduce-scatter")] == ["bf16[256,1024]"]
    assert checks.large(found, "all-reduce") == []


def test_a_gather_in_float32_is_seen():
    gathered = checks.large(collectives_of(dtype=jnp.dtype("float32")), "all-gather")
    assert {array.dtype for array in gathered} == {"f32"}


def test_the_gradient_of_a_weight_that_every_device_has_is_no_reduce_scatter():
    found = collectives_of(weight=WHOLE)
    assert checks.large(found, "reduce-scatter") == []
    assert [str(array) for array in checks.large(found, "all-reduce")] == ["bf16[2048,1024]"]


def test_another_dimension_is_an_exchange_of_everything():
    def turn(x):
        return jax.sharding.reshard(x, P(None, "data"))

    program = build(turn, WEIGHT, mesh="8x1", specs=(P("data", None),))
    assert checks.moved(program.module.collectives(), ("all-gather", "all-reduce"))
