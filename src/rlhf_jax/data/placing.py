"""Which rows of a batch share a sequence, where their lengths are known only after it was written.

Rows are spread over sequences so that all are about equally long; the length of the sequences is
then rounded up to an eighth of what they would be with rows as wide as they may be. So few sizes
exist, and few programs compile.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from rlhf_jax.data.batches import round_up
from rlhf_jax.models.packed_rows import Places

SIZES = 8
"""Lengths that sequences may have; the longest saves nothing."""
ROWS = 8
"""Rows of a sequence, on average, where there are so many."""
MULTIPLE = 8
"""Lengths of sequences that hold several rows are multiples of this many tokens."""


@dataclass(frozen=True)
class Groups:
    """Sets of rows that share no sequence: a batch has one for each shard and part of it.

    Shards are blocks of the batch, and the rows of each are dealt out to its parts in turn.
    """

    num_shards: int
    num_parts: int = 1

    @property
    def count(self) -> int:
        return self.num_shards * self.num_parts

    def split(self, array_B: np.ndarray) -> np.ndarray:
        """A batch as `[groups, rows of each]`."""
        dealt = array_B.reshape(self.num_shards, -1, self.num_parts)
        return dealt.swapaxes(1, 2).reshape(self.count, -1)

    def join(self, groups: np.ndarray) -> np.ndarray:
        """The batch of which `split` makes these groups."""
        return groups.reshape(self.num_shards, self.num_parts, -1).swapaxes(1, 2).reshape(-1)


def sizes(num_rows: int, width: int) -> tuple[int, list[int]]:
    """How many sequences hold `num_rows` rows of up to `width` tokens, and how long they may be."""
    count = max(1, num_rows // ROWS)
    full = num_rows * width
    return count, [round_up(-(-full * n // (SIZES * count)), MULTIPLE) for n in range(1, SIZES)]


def longest_sequence(num_rows: int, width: int) -> int:
    """The longest that `place` makes of so many rows in a group."""
    return sizes(num_rows, width)[1][-1]


def place(lengths_B: np.ndarray, groups: Groups, *, width: int, unpacked: int) -> Places | None:
    """Places for rows of these lengths (0: a row that nothing reads).

    Sequences have one of the sizes that rows of up to `width` tokens have. None where they would
    not save at least an eighth of the tokens of rows of `unpacked` tokens.
    """
    lengths = groups.split(lengths_B)
    num_rows = lengths.shape[1]
    count, allowed = sizes(num_rows, width)
    most = num_rows * unpacked * (SIZES - 1) // SIZES
    if lengths.sum(1).max() > most:  # as where all rows are full: nothing else is asked then
        return None
    numbers, offsets, longest = zip(*(spread(group, count) for group in lengths), strict=True)
    fitting = [size for size in allowed if size >= max(longest)]
    if not fitting or count * fitting[0] > most:
        return None
    begins = np.stack(numbers) * fitting[0] + np.stack(offsets)
    return Places(
        begins_B=groups.join(begins).astype(np.int32),
        lengths_B=lengths_B.astype(np.int32),
        num_sequences=count,
        length=fitting[0],
    )


def alone(lengths_B: np.ndarray, groups: Groups, width: int) -> Places:
    """A sequence of `width` tokens for each row."""
    num_rows = len(lengths_B) // groups.count
    begins = np.broadcast_to(np.arange(num_rows) * width, (groups.count, num_rows))
    return Places(
        begins_B=groups.join(begins).astype(np.int32),
        lengths_B=lengths_B.astype(np.int32),
        num_sequences=num_rows,
        length=width,
    )


def spread(lengths: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows over `count` sequences, the longest first, each to the shortest sequence: the number of
    each row's sequence, where in it the row begins, and the tokens of the longest sequence.
    """
    numbers, offsets = np.zeros_like(lengths), np.zeros_like(lengths)
    heap = [(0, number) for number in range(count)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        filled, number = heap[0]
        numbers[row], offsets[row] = number, filled
        heapq.heapreplace(heap, (filled + int(lengths[row]), number))
    return numbers, offsets, max(filled for filled, _ in heap)


def balance(lengths_B: np.ndarray, groups: Groups) -> np.ndarray:
    """An order of the rows in which all groups have about equally many tokens; theirs where there
    is one group, or where lengths do not differ.
    """
    if groups.count == 1 or lengths_B.min() == lengths_B.max():
        return np.arange(len(lengths_B))
    room = len(lengths_B) // groups.count
    members: list[list[int]] = [[] for _ in range(groups.count)]
    heap = [(0, number) for number in range(groups.count)]
    for row in np.argsort(-lengths_B, kind="stable").tolist():
        filled, number = heapq.heappop(heap)
        members[number].append(row)
        if len(members[number]) < room:
            heapq.heappush(heap, (filled + int(lengths_B[row]), number))
    return groups.join(np.array(members))
