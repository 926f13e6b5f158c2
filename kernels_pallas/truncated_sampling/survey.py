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
from kernels_pallas.truncated_sampling.rows import LEAST, Out, Row, Tiling, launch

TILING = Tiling(block=512, loads=8, num_warps=4)


class Survey(NamedTuple):
    """largest logit and sum of e^(z - largest) of each part, largest logits of all lanes."""

    largest: jax.Array
    total: jax.Array
    lanes: jax.Array


def survey(logits_BV: jax.Array, *, interpret: bool = False) -> Survey:
    """Of every row."""
    V = logits_BV.shape[1]
    tiling = TILING.fitted(V)
    outputs = [Out(jnp.float32), Out(jnp.float32), Out(jnp.float32, tiling.block)]
    return Survey(
        *launch(
            functools.partial(_kernel, vocab=V, tiling=tiling), [logits_BV], outputs,
            name="survey", num_parts=tiling.num_parts(V), num_warps=tiling.num_warps,
            interpret=interpret,
        )
    )  # fmt: skip


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
