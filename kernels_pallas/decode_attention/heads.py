"""Online softmax of one group's query heads inside the decode kernel, in two forms.

Both keep, per query head, (values weighted so far, running maximum, running sum) in fp32.
M is query heads per key/value head; the group's key and value tiles are [block, lanes].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton import load

MASKED = -1e30


class Turn:
    """The rotation of one row's heads: lane i with lane (i + K/2) mod K."""

    def __init__(self, refs: Sequence[Any], K: int, lanes: int) -> None:
        lane = jnp.arange(lanes)
        self.partner = jnp.where(lane < K // 2, lane + K // 2, lane - K // 2)
        self.cos, self.sin = (load(ref, None if lanes == K else lane < K) for ref in refs)


def turned(
    x: jax.Array, ref: Any, head: tuple[Any, ...], ok: jax.Array | None, turn: Turn | None
) -> jax.Array:
    """`x`, which is what `ref[*head, :]` holds, rotated in float32 where there is a turn."""
    if turn is None:
        return x
    partner, cos, sin = (
        jnp.broadcast_to(part, x.shape) for part in (turn.partner, turn.cos, turn.sin)
    )
    other = load(ref.at[(*head, partner)], ok).astype(jnp.float32)
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)


type HeadState = tuple[jax.Array, jax.Array, jax.Array]


class Heads(ABC):
    """What the kernel does with a group's heads; the state is an array tree of the form's own."""

    @abstractmethod
    def empty(self) -> Any:
        """State before the first key."""

    @abstractmethod
    def attend(
        self,
        state: Any,
        k: jax.Array,
        v: jax.Array,
        ok: jax.Array,
        scales: tuple[jax.Array, ...] = (),
    ) -> Any:
        """Adds a tile of keys, of which those with `ok` [block] count.

        `scales` [block] are those of its keys and values, where these have one byte a number.
        """

    @abstractmethod
    def attend_new(self, state: Any, k: jax.Array, v: jax.Array, ok: jax.Array) -> Any:
        """Adds one key [lanes], if `ok`."""

    @abstractmethod
    def write(self, refs: list[Any], state: Any) -> None:
        """Stores the normalized output and, when there is a second ref, the log of the sum."""


class VectorHeads(Heads):
    """One head after another on the vector units: best for few heads, where memory is the limit."""

    def __init__(self, q_ref: Any, M: int, K: int, turn: Turn | None) -> None:
        self.lanes = q_ref.shape[-1]
        self.lane_ok = None if self.lanes == K else jnp.arange(self.lanes) < K
        self.queries = []
        for m in range(M):
            q = load(q_ref.at[jnp.int32(m), :], self.lane_ok)
            q = turned(q, q_ref, (jnp.int32(m),), self.lane_ok, turn)
            self.queries.append(q.astype(jnp.float32) * K**-0.5)

    @override
    def empty(self) -> tuple[HeadState, ...]:
        none = jnp.zeros((self.lanes,), jnp.float32), jnp.float32(MASKED), jnp.float32(0.0)
        return tuple(none for _ in self.queries)

    @override
    def attend(
        self,
        state: tuple[HeadState, ...],
        k: jax.Array,
        v: jax.Array,
        ok: jax.Array,
        scales: tuple[jax.Array, ...] = (),
    ) -> tuple[HeadState, ...]:
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        heads = []
        for q, (out, top, total) in zip(self.queries, state, strict=True):
            score = jnp.sum(k * q[None, :], axis=-1)
            score = jnp.where(ok, score * scales[0] if scales else score, MASKED)
            new_top = jnp.maximum(top, jnp.max(score))
            keep = jnp.exp(top - new_top)
            # With every key masked the difference is 0 and exp gives 1: hence the second where.
            p = jnp.where(ok, jnp.exp(score - new_top), 0.0)
            weight = p * scales[1] if scales else p
            out = out * keep + jnp.sum(weight[:, None] * v, axis=0)
            heads.append((out, new_top, total * keep + jnp.sum(p)))
        return tuple(heads)

    @override
    def attend_new(
        self, state: tuple[HeadState, ...], k: jax.Array, v: jax.Array, ok: jax.Array
    ) -> tuple[HeadState, ...]:
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        heads = []
        for q, (out, top, total) in zip(self.queries, state, strict=True):
            score = jnp.where(ok, jnp.sum(k * q), MASKED)
            new_top = jnp.maximum(top, score)
            keep = jnp.exp(top - new_top)
            p = jnp.where(ok, jnp.exp(score - new_top), 0.0)
            heads.append((out * keep + p * v, new_top, total * keep + p))
        return tuple(heads)

    @override
    def write(self, refs: list[Any], state: tuple[HeadState, ...]) -> None:
        out_ref, *log_sum_refs = refs
        for m, (out, top, total) in enumerate(state):
            out, log_sum = _finish(out, top, total, total)
            plt.store(out_ref.at[jnp.int32(m), :], out.astype(out_ref.dtype), mask=self.lane_ok)
            for ref in log_sum_refs:
                ref[m] = log_sum


class DotHeads(Heads):
    """All heads of the group at once on the tensor cores; rows beyond M are padding."""

    def __init__(self, q_ref: Any, M: int, K: int, turn: Turn | None) -> None:
        rows, lanes = q_ref.shape
        self.row_ok = jnp.arange(rows) < M
        self.ok = self.row_ok[:, None] & (jnp.arange(lanes) < K)[None, :]
        row = jnp.broadcast_to(jnp.arange(rows)[:, None], q_ref.shape)
        self.q = turned(load(q_ref, self.ok), q_ref, (row,), self.ok, turn)
        self.scale = K**-0.5

    @override
    def empty(self) -> HeadState:
        rows, lanes = self.q.shape
        top = jnp.full((rows,), MASKED, jnp.float32)
        return jnp.zeros((rows, lanes), jnp.float32), top, jnp.zeros((rows,), jnp.float32)

    @override
    def attend(
        self,
        state: HeadState,
        k: jax.Array,
        v: jax.Array,
        ok: jax.Array,
        scales: tuple[jax.Array, ...] = (),
    ) -> HeadState:
        out, top, total = state
        k, v = k.astype(self.q.dtype), v.astype(self.q.dtype)
        score = plt.dot(self.q, k, trans_b=True) * self.scale
        if scales:
            score = score * scales[0][None, :]
        score = jnp.where(ok[None, :], score, MASKED)
        new_top = jnp.maximum(top, jnp.max(score, axis=-1))
        keep = jnp.exp(top - new_top)
        p = jnp.where(ok[None, :], jnp.exp(score - new_top[:, None]), 0.0)
        weight = p * scales[1][None, :] if scales else p
        out = out * keep[:, None] + plt.dot(weight.astype(v.dtype), v)
        return out, new_top, total * keep + jnp.sum(p, axis=-1)

    @override
    def attend_new(self, state: HeadState, k: jax.Array, v: jax.Array, ok: jax.Array) -> HeadState:
        out, top, total = state
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        score = jnp.sum(self.q.astype(jnp.float32) * k[None, :], axis=-1) * self.scale
        score = jnp.where(ok, score, MASKED)
        new_top = jnp.maximum(top, score)
        keep = jnp.exp(top - new_top)
        p = jnp.where(ok, jnp.exp(score - new_top), 0.0)
        return out * keep[:, None] + p[:, None] * v[None, :], new_top, total * keep + p

    @override
    def write(self, refs: list[Any], state: HeadState) -> None:
        out_ref, *log_sum_refs = refs
        out, top, total = state
        out, log_sum = _finish(out, top, total, total[:, None])
        plt.store(out_ref, out.astype(out_ref.dtype), mask=self.ok)
        for ref in log_sum_refs:
            plt.store(ref, log_sum, mask=self.row_ok)


def make_heads(q_ref: Any, M: int, K: int, turn: Turn | None, *, use_dot: bool) -> Heads:
    """The group's heads, with its queries loaded."""
    return (DotHeads if use_dot else VectorHeads)(q_ref, M, K, turn)


def _finish(out, top, total, divisor):
    """(out / divisor, log of the sum of exponentials); a split without keys has out 0."""
    log_sum = jnp.where(total > 0.0, top + jnp.log(jnp.where(total > 0.0, total, 1.0)), MASKED)
    return out / jnp.where(divisor > 0.0, divisor, 1.0), log_sum
