"""Rows of a batch in sequences that hold several, and back: each shard packs rows of its own, or
those that are dealt to it.

A batch stays `[B, T]`, rows padded on the right; only what goes through the layers is packed. What
was computed is read where a row asks for it, so that everything behind is row by row again.
"""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import Layout
from meshes.reshard import local_shards

type Rows = jax.Array | np.ndarray
"""A number of each row."""


@flax.struct.dataclass
class Places:
    """Where the rows of a batch stand in its sequences.

    Attributes:
        begins_B: int32, index of each row's first token among the tokens of all sequences of its
            shard.
        lengths_B: int32, tokens of each row; 0: it stands nowhere.
        num_sequences: of each shard; static.
        length: tokens of a sequence; static.
        rows_B: int32, where rows are dealt out to the shards: the row of the batch that each entry
            of `begins_B` and `lengths_B` belongs to.
        entries_B: int32, with them the entry of each row of the batch.
    """

    begins_B: Rows
    lengths_B: Rows
    num_sequences: int = flax.struct.field(pytree_node=False)
    length: int = flax.struct.field(pytree_node=False)
    rows_B: Rows | None = None
    entries_B: Rows | None = None

    @property
    def num_tokens(self) -> int:
        """Of all sequences of a shard."""
        return self.num_sequences * self.length

    def of_rows(self, order_B: np.ndarray) -> "Places":
        """The same for a batch whose row `order_B[n]` has entry n."""
        rows_B, entries_B = order_B.astype(np.int32), np.argsort(order_B).astype(np.int32)
        return replace(self, rows_B=rows_B, entries_B=entries_B)


def pack_rows(tokens_BT: jax.Array, places: Places, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Sequences `[N, T]` of several rows each, and for every token where its row begins.

    Behind the last row of a sequence stand zeros, each a row of its own.
    """

    def local(tokens: jax.Array, begins: jax.Array, lengths: jax.Array) -> list[jax.Array]:
        index = _index(begins, lengths, jnp.zeros_like(begins), tokens.shape[1], places.num_tokens)
        firsts = jnp.broadcast_to(begins[:, None] % places.length, tokens.shape)
        starts = jnp.arange(places.num_tokens, dtype=jnp.int32) % places.length
        shape = places.num_sequences, places.length
        return [
            array.at[index].set(values, mode="drop", unique_indices=True).reshape(shape)
            for array, values in ((jnp.zeros_like(starts), tokens), (starts, firsts))
        ]

    rows, one = ("batch", None), ("batch",)
    run = local_shards(local, layout, in_axes=(rows, one, one), out_axes=[rows, rows])
    tokens_BT = _take(tokens_BT, places.rows_B, layout)
    tokens_NT, starts_NT = run(tokens_BT, places.begins_B, places.lengths_B)
    return tokens_NT, starts_NT


def read_rows(
    array_NT: jax.Array, start_B: jax.Array, length: int, places: Places, layout: Layout
) -> jax.Array:
    """`length` positions of every row from `start_B` on: `[N, T, ...]` to `[B, length, ...]`.

    Behind the end of a row stands 0.
    """

    def local(
        array: jax.Array, start: jax.Array, begins: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        index = _index(begins, lengths, start, length, places.num_tokens)
        flat = array.reshape(places.num_tokens, *array.shape[2:])
        # Unique, so that the gradient is written, not added atomically.
        return flat.at[index].get(mode="fill", fill_value=0, unique_indices=True)

    axes, one = ("batch",) + (None,) * (array_NT.ndim - 1), ("batch",)
    run = local_shards(local, layout, in_axes=(axes, one, one, one), out_axes=axes)
    start_B = _take(start_B, places.rows_B, layout)
    read = run(array_NT, start_B, places.begins_B, places.lengths_B)
    return _take(read, places.entries_B, layout)


def answers_first(
    hidden_NTW: jax.Array,
    targets_BR: jax.Array,
    prompt_lengths_B: jax.Array,
    places: Places,
    layout: Layout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states that predict answers `[B, R, W]`, their tokens, and how many each row has.

    The answers of a shard stand one after the other, and behind them zeros: not in the order of
    rows. `answers_in_rows` puts back what was computed of them.
    """
    width = targets_BR.shape[1]

    def local(hidden, targets, prompts, begins, lengths) -> list[jax.Array]:
        counts, to = _answers(prompts, lengths, width)
        before = (begins + prompts - 1)[:, None] + jnp.arange(width, dtype=jnp.int32)
        nowhere = places.num_tokens + jnp.arange(to.size, dtype=jnp.int32)
        source = nowhere.at[to].set(before, mode="drop", unique_indices=True)
        flat = hidden.reshape(places.num_tokens, hidden.shape[-1])
        taken = flat.at[source].get(mode="fill", fill_value=0, unique_indices=True)
        moved = jnp.zeros(to.size, targets.dtype)
        moved = moved.at[to].set(targets, mode="drop", unique_indices=True)
        return [taken.reshape(*to.shape, -1), moved.reshape(to.shape), counts]

    rows, one, wide = ("batch", None), ("batch",), ("batch", None, None)
    run = local_shards(
        local, layout, in_axes=(wide, rows, one, one, one), out_axes=[wide, rows, one]
    )
    dealt = (_take(array, places.rows_B, layout) for array in (targets_BR, prompt_lengths_B))
    hidden_BRW, targets_BR, counts_B = run(hidden_NTW, *dealt, places.begins_B, places.lengths_B)
    return hidden_BRW, targets_BR, counts_B


def answers_in_rows(
    array_BR: jax.Array, prompt_lengths_B: jax.Array, places: Places, layout: Layout
) -> jax.Array:
    """What was computed in the order of `answers_first`, row by row; behind an answer stands 0."""

    def local(array: jax.Array, prompts: jax.Array, lengths: jax.Array) -> jax.Array:
        _, at = _answers(prompts, lengths, array.shape[1])
        return array.reshape(-1).at[at].get(mode="fill", fill_value=0, unique_indices=True)

    rows, one = ("batch", None), ("batch",)
    run = local_shards(local, layout, in_axes=(rows, one, one), out_axes=rows)
    prompt_lengths_B = _take(prompt_lengths_B, places.rows_B, layout)
    back = run(array_BR, prompt_lengths_B, places.lengths_B)
    return _take(back, places.entries_B, layout)


def _take(array_B: jax.Array, rows_B: Rows | None, layout: Layout) -> jax.Array:
    """These rows of all shards, `[B, ...]`; without `rows_B` each shard's own."""
    if rows_B is None:
        return array_B
    spec = layout.spec("batch", *(None,) * (array_B.ndim - 1))
    return array_B.at[rows_B].get(out_sharding=spec)


def _answers(prompts_B: jax.Array, lengths_B: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Tokens of each answer, and the place of each where one answer follows the other, `[B, R]`;
    for those that there are not another number beyond all places.
    """
    counts = jnp.clip(lengths_B - prompts_B, 0, width)
    firsts, zeros = jnp.cumsum(counts, dtype=counts.dtype) - counts, jnp.zeros_like(counts)
    return counts, _index(firsts, counts, zeros, width, counts.size * width)


def _index(
    begins_B: jax.Array, lengths_B: jax.Array, start_B: jax.Array, width: int, num_tokens: int
) -> jax.Array:
    """Where positions `start_B` on of each row stand, `[B, width]`; each that a row does not have
    is another number beyond `num_tokens`.
    """
    shape = len(begins_B), width
    offset = start_B[:, None] + jnp.arange(width, dtype=jnp.int32)
    nowhere = num_tokens + jnp.arange(shape[0] * width, dtype=jnp.int32).reshape(shape)
    return jnp.where(offset < lengths_B[:, None], begins_B[:, None] + offset, nowhere)
