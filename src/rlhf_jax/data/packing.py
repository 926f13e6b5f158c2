"""Several rows in one sequence, so that a batch has few tokens of padding.

Rows stand one after the other; `starts_BT` says for every token where its row begins. Attention
stays inside a row and positions count from its first token, so a row gives the same predictions as
alone. Which rows share a sequence is a function of (seed, epoch), how many sequences an epoch has
of the lengths alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import flax.struct
import numpy as np

from rlhf_jax.data.batches import round_up
from rlhf_jax.data.tokenize import PairRow, SftRow

WELL_FILLED = 0.95


@flax.struct.dataclass
class PackedBatch:
    """Prompts and answers, several in a sequence.

    Attributes:
        tokens_BT: int32; 0 behind the last row of a sequence.
        starts_BT: int32, index of the first token of each token's row; the padding is a row too.
        counted_BT: float32, 1 where a token is a target: it is neither padding nor first in its
            row, nor in a prompt where only answers are trained.
    """

    tokens_BT: np.ndarray
    starts_BT: np.ndarray
    counted_BT: np.ndarray


@flax.struct.dataclass
class PackedPairs:
    """Pairs of answers, several in a sequence: chosen, rejected, chosen, rejected, …

    Attributes:
        tokens_BT, starts_BT: as in `PackedBatch`.
        chosen_ends_BN: int32, where the last token of each pair's better row stands.
        rejected_ends_BN: int32, of the other row.
        margin_BN: float32, by how much the scores should differ; 0 where the data do not say.
        valid_BN: float32, 0 where a sequence has fewer pairs, else 1.
    """

    tokens_BT: np.ndarray
    starts_BT: np.ndarray
    chosen_ends_BN: np.ndarray
    rejected_ends_BN: np.ndarray
    margin_BN: np.ndarray
    valid_BN: np.ndarray


@dataclass(frozen=True)
class Packing:
    """How rows of `lengths` tokens fill sequences of `length`.

    Attributes:
        lengths: tokens of every row of the data set.
        length: of a sequence; no row is longer.
    """

    lengths: np.ndarray
    length: int

    def __post_init__(self) -> None:
        longest = int(self.lengths.max())
        if longest > self.length:
            raise ValueError(f"a row of {longest} tokens does not fit a sequence of {self.length}")

    @classmethod
    def of(
        cls, lengths: Sequence[int], pad_multiple: int, *, batch_size: int, multiple: int
    ) -> "Packing":
        """Sequences as long as the longest row, rounded up, or 2, 4 or 8 times that: the first that
        are well filled, else the best filled. Rows of like length need the room.

        Not so long that a batch would have more tokens than `batch_size` of the longest row.
        """
        longest = round_up(max(lengths), pad_multiple)
        shortest, *longer = (cls(np.asarray(lengths), n * longest) for n in (1, 2, 4, 8))
        most = batch_size * longest
        candidates = [shortest]
        for each in longer:
            if each.sequences_per_batch(batch_size, multiple) * each.length <= most:
                candidates.append(each)
        well_filled = (each for each in candidates if each.filled >= WELL_FILLED)
        return next(well_filled, None) or max(candidates, key=lambda each: each.filled)

    def sequences_per_batch(self, batch_size: int, multiple: int) -> int:
        """How many hold `batch_size` rows on average: the nearest multiple of `multiple`."""
        wanted = batch_size * self.num_sequences / len(self.lengths) / multiple
        return max(1, round(wanted)) * multiple

    @cached_property
    def num_sequences(self) -> int:
        """How many sequences all rows fill."""
        return len(self._any_order)

    @cached_property
    def most_rows(self) -> int:
        """How many rows the sequence with the most of them holds."""
        return max(map(len, self._any_order))

    @property
    def filled(self) -> float:
        """The share of tokens that are no padding."""
        return float(self.lengths.sum()) / (self.num_sequences * self.length)

    @cached_property
    def _any_order(self) -> list[np.ndarray]:
        return self.pack(np.arange(len(self.lengths)))

    def pack(self, order: np.ndarray) -> list[np.ndarray]:
        """Row numbers of every sequence, for rows that come in this order.

        The longest rows are placed first, each where the least room is left that holds it (best
        fit decreasing), so the lengths of every sequence depend on those of the rows alone. Among
        rows of equal length the order decides. Sequences come in the order in which they were
        opened.
        """
        longest_first = order[np.argsort(-self.lengths[order], kind="stable")]
        sequences: list[list[int]] = []
        with_room: list[list[int]] = [[] for _ in range(self.length + 1)]
        rooms = 0  # bit r is set where a sequence has room for r tokens
        for row in longest_first.tolist():
            size = int(self.lengths[row])
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                number = with_room[room].pop()
                if not with_room[room]:
                    rooms &= ~(1 << room)
                sequences[number].append(row)
            else:
                room, number = self.length, len(sequences)
                sequences.append([row])
            left = room - size
            if left:
                with_room[left].append(number)
                rooms |= 1 << left
        return [np.array(rows) for rows in sequences]


def collate_packed(
    sequences: Sequence[Sequence[SftRow]], batch_size: int, *, length: int, answers_only: bool
) -> PackedBatch:
    """A batch of `batch_size` sequences of `length` tokens; the last ones may be all padding."""
    tokens, starts = _empty(batch_size, length)
    counted = np.zeros((batch_size, length), np.float32)
    for n, rows in enumerate(sequences):
        begins = _place(tokens[n], starts[n], [row.tokens for row in rows])
        for begin, row in zip(begins, rows, strict=True):
            first = max(1, row.prompt_length) if answers_only else 1
            counted[n, begin + first : begin + len(row.tokens)] = 1
    return PackedBatch(tokens, starts, counted)


def collate_packed_pairs(
    sequences: Sequence[Sequence[PairRow]], batch_size: int, *, length: int, most_pairs: int
) -> PackedPairs:
    """A batch of `batch_size` sequences of `length` tokens with up to `most_pairs` pairs each."""
    tokens, starts = _empty(batch_size, length)
    shape = (batch_size, most_pairs)
    chosen, rejected = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    margin, valid = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for n, rows in enumerate(sequences):
        sides = [side for row in rows for side in (row.chosen, row.rejected)]
        begins = _place(tokens[n], starts[n], sides)
        ends = np.array([at + len(side) - 1 for at, side in zip(begins, sides, strict=True)])
        chosen[n, : len(rows)], rejected[n, : len(rows)] = ends[::2], ends[1::2]
        margin[n, : len(rows)] = [row.margin for row in rows]
        valid[n, : len(rows)] = 1
    return PackedPairs(tokens, starts, chosen, rejected, margin, valid)


def _empty(batch_size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and starts of sequences that are all padding."""
    return np.zeros((batch_size, length), np.int32), np.zeros((batch_size, length), np.int32)


def _place(tokens_T: np.ndarray, starts_T: np.ndarray, rows: Sequence[np.ndarray]) -> list[int]:
    """Writes rows into a sequence; where each of them begins."""
    begins, at = [], 0
    for row in rows:
        begins.append(at)
        tokens_T[at : at + len(row)] = row
        starts_T[at : at + len(row)] = at
        at += len(row)
    starts_T[at:] = at
    return begins
