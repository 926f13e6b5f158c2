"""Sampling where the vocabulary is sharded: the tokens of one device, and no logits gathered."""

import math
from functools import partial

import jax
import numpy as np
import pytest

from meshes.layout import Layout, make_mesh, parse_mesh
from rlhf_jax.engine.noise import gumbel_noise, gumbel_noise_from
from rlhf_jax.engine.sampling import SamplingConfig, sample
from tests.meshes.compiled import collectives, gathered

B, V = 8, 128
MESHES = [("1x2", 2), ("4x1", 4), ("8x1", 8), ("4x2", 4)]  # the last one shards the batch too
STOPS = (0, 77)
CONFIGS = {
    "temperature": SamplingConfig(temperature=0.8),
    "greedy": SamplingConfig(temperature=0),
    "no_stop_yet": SamplingConfig(min_new_tokens=2),
    "penalty": SamplingConfig(repetition_penalty=3.0),
    "top_k": SamplingConfig(top_k=5),
    "all": SamplingConfig(
        top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=2.0, min_new_tokens=2, temperature=0.7
    ),
}
LOCAL = ["temperature", "greedy", "no_stop_yet", "penalty"]


def layout_on(mesh: str, inference_tp: int) -> Layout:
    return Layout.create(make_mesh(parse_mesh(mesh), inference_tp), "generate", {"vocab": V})


def operands(layout: Layout, rows: int, seen: bool) -> tuple:
    """Logits that prefer stops and tokens seen; padding behind column 120; equal largest ones."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (rows, V)).astype(np.float32)
    seen_BV = rng.random((rows, V)) < 0.5
    logits[:, STOPS] += 6
    logits[:, 120:] = -np.inf
    logits[1, [20, 90]] = 30.0
    put = jax.make_array_from_callback
    index = np.arange(rows, dtype=np.int32) % 4
    arrays = [
        (logits, ("batch", "vocab")),
        (np.arange(rows, dtype=np.int32) * 7, ("batch",)),
        (index, ("batch",)),
        (seen_BV, ("batch", None)),
    ]
    out = [put(x.shape, layout.sharding(*axes), lambda i, x=x: x[i]) for x, axes in arrays]
    return (*out[:3], out[3] if seen else None)


def program(layout: Layout, name: str):
    cfg = CONFIGS[name]

    def run(logits, ids, index, seen, key):
        return sample(logits, ids, index, cfg, STOPS, layout, seen, key=key)

    return jax.jit(run)


def draw(layout: Layout, name: str, rows: int = B) -> tuple[np.ndarray, np.ndarray]:
    arrays = operands(layout, rows, CONFIGS[name].penalises)
    with jax.set_mesh(layout.mesh):
        token, logprob = program(layout, name)(*arrays, jax.random.key(3))
    return np.asarray(token), np.asarray(logprob)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_do_not_depend_on_the_mesh(name: str) -> None:
    token, logprob = draw(layout_on("1x1", 1), name)
    assert len(set(token)) > 2
    for mesh in MESHES:
        sharded, sharded_logprob = draw(layout_on(*mesh), name)
        np.testing.assert_array_equal(sharded, token, err_msg=str(mesh))
        np.testing.assert_allclose(sharded_logprob, logprob, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_divide_over_the_devices_are_sampled_too() -> None:
    layout = layout_on("8x1", 8)
    np.testing.assert_array_equal(
        draw(layout, "top_k", 6)[0], draw(layout_on("1x1", 1), "top_k", 6)[0]
    )


def compiled(layout: Layout, name: str) -> jax.stages.Compiled:
    arrays = operands(layout, B, CONFIGS[name].penalises)
    with jax.set_mesh(layout.mesh):
        return program(layout, name).lower(*arrays, jax.random.key(3)).compile()


@pytest.mark.parametrize("name", LOCAL)
def test_only_the_winners_travel(name: str) -> None:
    """Four words a row from each of 8 devices."""
    found = compiled(layout_on("8x1", 8), name)
    assert collectives(found) == {"all-gather": 1}
    (kind,) = gathered(found)
    assert math.prod(int(n) for n in kind.split("[")[1].rstrip("]").split(",")) == 8 * 4 * B


def test_truncated_rows_are_exchanged_and_not_gathered() -> None:
    """Every device gets its rows whole; the tokens come back in a gather."""
    found = compiled(layout_on("8x1", 8), "top_k")
    assert collectives(found)["all-to-all"] == 1
    assert gathered(found) <= {f"s32[{B}]", f"f32[{B}]", f"s32[8,{B // 8}]", f"f32[8,{B // 8}]"}


def test_noise_of_some_columns_is_part_of_the_noise_of_all() -> None:
    key = jax.random.key_data(jax.random.key(5))
    ids, index = np.array([3, 9], np.int32), np.array([0, 4], np.int32)
    every = np.asarray(jax.jit(partial(gumbel_noise, vocab=V))(key, index, ids))
    some = jax.jit(partial(gumbel_noise_from, width=32))
    for first in (0, 32, 96):
        part = some(key, index, ids, np.int32(first))
        np.testing.assert_array_equal(part, every[:, first : first + 32])
    folded = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 4), 9)
    np.testing.assert_array_equal(every[1], jax.jit(lambda k: jax.random.gumbel(k, (V,)))(folded))
