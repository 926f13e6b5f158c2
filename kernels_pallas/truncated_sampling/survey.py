"""The first look at rows: what is their largest logit, their sum, and a sample of the largest.

Every program has a part of a row. A lane of it keeps its largest logit: where k lanes have one
above a cut, so have k tokens, and not many more.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton import next_power_of_2
from kernels_pallas.truncated_sampling.rows import LEAST, Row, Tiling

TILING = Tiling(block=512, loads=8, num_warps=4)


class Survey(NamedTuple):
    """largest logit and sum of e^(z - largest) of each part, largest logits of all lanes."""

    largest: jax.Array
    total: jax.Array
    lanes: jax.Array


def survey(logits_BV: jax.Array, *, interpret: bool = False) -> Survey:
    """Of every row."""
    B, V = logits_BV.shape
    tiling = TILING.fitted(V)
    num = tiling.num_parts(V)
    part = pl.BlockSpec((None, None), lambda b, i: (b, i))
    lanes = pl.BlockSpec((None, tiling.block), lambda b, i: (b, i))
    shapes = [(B, num), (B, num), (B, num * tiling.block)]
    return Survey(
        *pl.pallas_call(
            functools.partial(_kernel, vocab=V, tiling=tiling),
            grid=(B, num),
            in_specs=[pl.BlockSpec((None, V), lambda b, i: (b, 0))],
            out_specs=[part, part, lanes],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=2),
            interpret=interpret,
            name="truncated_sampling_survey",
        )(logits_BV)
    )


def _kernel(logits_ref, largest_ref, total_ref, lanes_ref, *, vocab: int, tiling: Tiling):
    blocks = Row(logits_ref, vocab, tiling).part(pl.program_id(1))
    lanes = functools.reduce(jnp.maximum, (block.logit for block in blocks))
    lanes_ref[...] = lanes
    largest_ref[()], total_ref[()] = sum_of([block.logit for block in blocks], jnp.max(lanes))


def sum_of(logits: list[jax.Array], largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of some logits, but at least LEAST, and their sum of e^(z - largest)."""
    top = jnp.maximum(largest, LEAST)
    return top, jnp.sum(sum(jnp.exp(logit - top) for logit in logits))


def log_sum(largest: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a row from that of its parts: the largest logit, and log sum e^z."""
    top = jnp.max(largest)
    return top, top + jnp.log(jnp.sum(total * jnp.exp(largest - top)))


def load_all(ref, other: float) -> jax.Array:
    """All of a ref whose length is no power of two."""
    width = next_power_of_2(ref.shape[0])
    mask = jnp.arange(width, dtype=jnp.int32) < ref.shape[0]
    return plt.load(ref.at[pl.ds(0, width)], mask=mask, other=other)
