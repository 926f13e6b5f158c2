"""A row inside a kernel: read in blocks, from the card's cache after the first time.

A row is too long for registers. Every lane of a block keeps its own largest, count and sum; they
are combined at the end of a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from kernels_pallas.triton import next_power_of_2, silence_backend_deprecation
from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.search import Pass, Rule

LEAST = float(jnp.finfo(jnp.float32).min)  # in the place of -inf, where a difference is taken
GUESS_STEPS = 12


class Out(NamedTuple):
    """What a program of `launch` writes: one number, or `width` of them. A row's parts each have
    their own, or together those of the `whole` row.
    """

    dtype: DTypeLike
    width: int | None = None
    whole: bool = False


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[Out],
    *,
    name: str,
    num_warps: int,
    interpret: bool,
    num_parts: int | None = None,
) -> list[jax.Array]:
    """Runs `kernel` with a program for each row, or for each of `num_parts` of each row. It sees
    its row of all arrays, which are `[B, n]`. Outputs are `[B, ...]`, those of parts side by side.
    """
    silence_backend_deprecation()
    B = len(arrays[0])

    def place(out: Out) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        width = () if out.width is None else (out.width,)
        if num_parts is None or out.whole:
            spec = pl.BlockSpec((None, *width), lambda b, *_: (b, *(0 for _ in width)))
            return spec, jax.ShapeDtypeStruct((B, *width), out.dtype)
        spec = pl.BlockSpec((None, *(width or (None,))), lambda b, i: (b, i))
        return spec, jax.ShapeDtypeStruct((B, num_parts * (out.width or 1)), out.dtype)

    specs, shapes = zip(*map(place, outputs), strict=True)
    return pl.pallas_call(
        kernel,
        grid=(B,) if num_parts is None else (B, num_parts),
        in_specs=[pl.BlockSpec((None, x.shape[1]), lambda b, *_: (b, 0)) for x in arrays],
        out_specs=list(specs),
        out_shape=list(shapes),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name=f"truncated_sampling_{name}",
    )(*arrays)


@dataclass(frozen=True)
class Tiling:
    """block: logits in an array (power of two); loads: blocks read at a time; num_warps: of a
    program (power of two).
    """

    block: int
    loads: int
    num_warps: int

    def fitted(self, vocab: int) -> "Tiling":
        """The same for rows that may be shorter than a block."""
        block = min(self.block, max(16, next_power_of_2(vocab)))
        return replace(self, block=block, loads=min(self.loads, -(-vocab // block)))

    def num_parts(self, vocab: int) -> int:
        """Programs that share a row, if each reads once."""
        return -(-vocab // (self.block * self.loads))


SEARCH = Tiling(block=4096, loads=1, num_warps=16)
"""Of a program that reads a whole row. With one block at a time the first of equal sums wins."""


class Block(NamedTuple):
    """Part of a row. Behind the row's end `logit` is -inf."""

    token: jax.Array
    here: Any
    real: jax.Array
    logit: jax.Array


class Looked(NamedTuple):
    """A pass, by lane or of a row: the best score above the pivot and its token; how many
    logits are above the pivot and their mass; the same from the pivot on.
    """

    score: jax.Array
    token: jax.Array
    num_above: jax.Array
    mass_above: jax.Array
    num_from: jax.Array
    mass_from: jax.Array

    @classmethod
    def empty(cls, num_lanes: int) -> "Looked":
        count, mass = jnp.zeros((num_lanes,), jnp.int32), jnp.zeros((num_lanes,), jnp.float32)
        return cls(jnp.full_like(mass, -jnp.inf), count, count, mass, count, mass)

    def of_row(self, vocab: int) -> "Looked":
        """The lanes together."""
        sums = (jnp.sum(part) for part in self[2:])
        return Looked(jnp.max(self.score), winner(self.score, self.token, vocab), *sums)


NoiseAt = Callable[[Block, jax.Array], jax.Array]
"""The noise of a block's tokens, at least where the mask says."""


@dataclass(frozen=True)
class Row:
    """The logits of one row in memory."""

    logits_ref: Any
    vocab: int
    tiling: Tiling

    def part(self, i: jax.Array) -> list[Block]:
        """Those of the i-th of the programs that share the row: neighbours go to different ones."""
        num = self.tiling.num_parts(self.vocab)
        return [self._block(i + j * num) for j in range(self.tiling.loads)]

    def _block(self, i: jax.Array) -> Block:
        size = self.tiling.block
        token = i * size + jnp.arange(size, dtype=jnp.int32)
        here, real = pl.ds(i * size, size), token < self.vocab
        return Block(
            token, here, real, plt.load(self.logits_ref.at[here], mask=real, other=-jnp.inf)
        )

    def all(self, add: Callable[[list[Block], Any], Any], start: Any) -> Any:
        """A pass over all parts: `add(blocks, carry)`."""
        steps = self.tiling.num_parts(self.vocab)
        return lax.fori_loop(0, steps, lambda i, carry: add(self.part(i), carry), start)

    def found(self, looked: Looked, pivot: jax.Array, log_sum: jax.Array) -> Pass:
        """What the search wants of a pass over the whole row."""
        return Pass(
            num_above=looked.num_above,
            mass_above=looked.mass_above,
            num_from=looked.num_from,
            mass_from=looked.mass_from,
            weight=jnp.exp(pivot - log_sum),
            token=looked.token,
            logit=plt.load(self.logits_ref.at[looked.token]),
        )

    def search(
        self, noise_at: NoiseAt, state: search.State, log_sum, floor, rule: Rule
    ) -> search.State:
        """The end of a search: reads the row until a candidate is kept."""

        def step(state: search.State) -> search.State:
            def add(blocks: list[Block], lanes: Looked) -> Looked:
                return look(blocks, lanes, noise_at, state.pivot, log_sum, floor, rule)

            looked = self.all(add, Looked.empty(self.tiling.block)).of_row(self.vocab)
            found = self.found(looked, state.pivot, log_sum)
            return search.advance(state, found, rule, floor)

        return lax.while_loop(lambda state: ~state.done, step, state)


def look(
    blocks: list[Block], lanes: Looked, noise_at: NoiseAt, pivot, log_sum, floor, rule: Rule
) -> Looked:
    """Adds blocks to a pass at `pivot`; the noise of those that can still win is read."""
    masks = [logit > pivot for *_, logit in blocks]
    noises = [noise_at(block, mask) for block, mask in zip(blocks, masks, strict=True)]
    score, token, count_above, above, count_from, from_pivot = lanes
    for block, larger, noise in zip(blocks, masks, noises, strict=True):
        logit, new = block.logit, block.logit + noise
        wanted = larger & (logit >= floor) if rule.min_p > 0 else larger
        better = wanted & (new > score)
        score, token = jnp.where(better, new, score), jnp.where(better, block.token, token)
        if rule.counts:
            count_above = count_above + larger.astype(jnp.int32)
        if rule.weighs:
            weight = jnp.exp(logit - log_sum)
            above = above + jnp.where(larger, weight, 0.0)
            if rule.bounds:
                at_least = logit >= pivot
                count_from = count_from + at_least.astype(jnp.int32)
                from_pivot = from_pivot + jnp.where(at_least, weight, 0.0)
    return Looked(score, token, count_above, above, count_from, from_pivot)


def winner(score: jax.Array, token: jax.Array, vocab: int) -> jax.Array:
    """The token of the largest score; the first of them where they are equal."""
    return jnp.min(jnp.where(score == jnp.max(score), token, vocab - 1))


def quantile(largest_lane: jax.Array, count: int, below: float) -> jax.Array:
    """A logit that at least `count` lanes have a larger one than, near the largest such; -inf if
    there is none less than `below` under the largest of all.
    """
    largest = jnp.max(largest_lane)
    lowest = jnp.min(jnp.where(largest_lane > LEAST, largest_lane, largest))

    def enough(logit: jax.Array) -> jax.Array:
        return jnp.sum((largest_lane > logit).astype(jnp.int32)) >= count

    def halve(_, bracket):
        low, high, best = bracket
        middle = 0.5 * (low + high)
        out = enough(middle)
        return (
            jnp.where(out, middle, low),
            jnp.where(out, high, middle),
            jnp.where(out, middle, best),
        )

    low = jnp.maximum(lowest, largest - below)
    best = jnp.where(enough(low), low, -jnp.inf)
    return lax.fori_loop(0, GUESS_STEPS, halve, (low, largest, best))[2]
