"""Compiled for an H200 without one: the decode loop updates its caches in place.

Runs where the CUDA plugin of JAX is installed (no GPU and no driver are needed), else is skipped.
The target file describes the GPU; jax writes it with `get_topology_for_devices(...).target_config`.
"""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from kernels_pallas.decode_attention.api import decode_attention
from tests.meshes.compiled import optimizing_compiler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    and importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="no CUDA plugin of JAX is installed",
)
TARGET = Path(__file__).with_name("h200_target_config.txtpb")
NUM_LAYERS = 3
SHAPES = [
    pytest.param(64, 32, 32, 512, 64, None, id="opt-1.3b_B64"),
    pytest.param(1, 32, 32, 512, 64, None, id="opt-1.3b_B1"),
    pytest.param(8, 32, 32, 500, 80, None, id="opt-2.7b_B8_ragged"),
    pytest.param(64, 32, 8, 512, 128, None, id="llama-3-8b_B64"),
    pytest.param(64, 32, 8, 1024, 128, 256, id="mistral_window_B64"),
]


@pytest.fixture(scope="module")
def h200() -> jax.sharding.Mesh:
    """A mesh of one H200 that is not attached."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    return jax.sharding.Mesh(np.array(topology.devices), ("x",))


@pytest.mark.parametrize(("B", "H", "G", "S", "K", "window"), SHAPES)
def test_no_cache_is_copied_in_the_loop(
    h200: jax.sharding.Mesh, B: int, H: int, G: int, S: int, K: int, window: int | None
) -> None:
    def generate(qkv_BGEK, positions_B, turn, caches):
        def one_token(i, carry):
            qkv_BGEK, caches = carry
            new = []
            for k_cache, v_cache in caches:
                out, *updated = decode_attention(
                    qkv_BGEK, positions_B + i, k_cache, v_cache, None, None, *turn, window=window
                )
                new.append(tuple(updated))
                qkv_BGEK = qkv_BGEK + out.reshape(B, G, -1, K)[:, :, :1]
            return qkv_BGEK, new

        return jax.lax.fori_loop(0, S, one_token, (qkv_BGEK, caches))

    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        everywhere = jax.sharding.NamedSharding(h200, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    caches = [(array(B, G, S, K), array(B, G, S, K)) for _ in range(NUM_LAYERS)]
    turn = [array(B, K, dtype=jnp.float32)] * 2
    with jax.set_mesh(h200):
        lowered = jax.jit(generate, donate_argnums=(3,)).lower(
            array(B, G, H // G + 2, K), array(B, dtype=jnp.int32), turn, caches
        )
    with optimizing_compiler():
        compiled = lowered.compile()
    text = compiled.as_text()
    assert text is not None
    assert text.count("__gpu$xla.gpu.triton") == NUM_LAYERS
    cache_copies = re.findall(rf"bf16\[{B},{G},{S},{K}\]\S* (?:copy|copy-start)\(", text)
    assert cache_copies == []
    memory = compiled.memory_analysis()
    one_cache = B * G * S * K * 2
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * NUM_LAYERS * one_cache
    assert memory.temp_size_in_bytes < one_cache
