"""Rows to batches of a fixed shape: NumPy, the whole global batch, right-padded.

Padding is id 0 and means nothing: lengths alone say what is real. A batch with too few rows is
filled up with copies of its first row whose `valid_B` is 0, so that every length is positive and
no program divides by a filler row's zero tokens.
"""

from collections import Counter
from collections.abc import Sequence

import flax.struct
import numpy as np

from rlhf_jax.data.tokenize import PairRow, PromptRow, SftRow

COPIES_APART, MAX_COPIES = 2**22, 2**9
"""Between the sample ids of a prompt that stands in a batch several times (in a weighted blend), so
that each has an answer of its own; and how often it may.
"""


@flax.struct.dataclass
class TextBatch:
    """Prompt and answer in one row.

    Attributes:
        tokens_BT: int32.
        lengths_B: int32, tokens of prompt, answer and EOS.
        prompt_lengths_B: int32.
        valid_B: float32, 0 for filler rows, else 1.
    """

    tokens_BT: np.ndarray
    lengths_B: np.ndarray
    prompt_lengths_B: np.ndarray
    valid_B: np.ndarray


@flax.struct.dataclass
class PairBatch:
    """Row b of `chosen` and of `rejected` answer the same prompt; both have the same shape.

    Attributes:
        chosen: prompts and the better answers.
        rejected: prompts and the other answers.
        margin_B: float32, by how much the scores should differ; 0 where the data do not say.
    """

    chosen: TextBatch
    rejected: TextBatch
    margin_B: np.ndarray


@flax.struct.dataclass
class PromptBatch:
    """Prompts to answer.

    Attributes:
        tokens_BP: int32; P is one of the buckets.
        lengths_B: int32.
        sample_ids_B: int32, `PromptRow.sample_id`, and `COPIES_APART` more for every earlier row
            of the same prompt; a filler row has that of the row it copies.
        valid_B: float32, 0 for filler rows, else 1.
        limits_B: int32, the most new tokens of each row where that is less than the sampling's
            `max_new_tokens`; None: that of the sampling for all.
    """

    tokens_BP: np.ndarray
    lengths_B: np.ndarray
    sample_ids_B: np.ndarray
    valid_B: np.ndarray
    limits_B: np.ndarray | None = None


def collate_text(rows: Sequence[SftRow], batch_size: int, *, length: int) -> TextBatch:
    """A batch of `batch_size` rows of `length` tokens."""
    prompt_lengths = [row.prompt_length for row in rows]
    return _text_batch([row.tokens for row in rows], prompt_lengths, batch_size, length)


def collate_pairs(rows: Sequence[PairRow], batch_size: int, *, length: int) -> PairBatch:
    """A batch of `batch_size` pairs of rows of `length` tokens."""
    prompt_lengths = [row.prompt_length for row in rows]
    return PairBatch(
        chosen=_text_batch([row.chosen for row in rows], prompt_lengths, batch_size, length),
        rejected=_text_batch([row.rejected for row in rows], prompt_lengths, batch_size, length),
        margin_B=_fill([row.margin for row in rows], batch_size, np.float32),
    )


def collate_prompts(
    rows: Sequence[PromptRow], batch_size: int, *, buckets: tuple[int, ...]
) -> PromptBatch:
    """A batch of `batch_size` prompts, as long as the smallest bucket that holds the longest."""
    tokens = [row.tokens for row in rows]
    length = bucket_of(max(map(len, tokens)), buckets)
    return PromptBatch(
        tokens_BP=_pad(tokens, batch_size, length),
        lengths_B=_fill([len(ids) for ids in tokens], batch_size),
        sample_ids_B=_fill(_sample_ids(rows), batch_size),
        valid_B=_valid(len(rows), batch_size),
    )


def _sample_ids(rows: Sequence[PromptRow]) -> list[int]:
    copies: Counter[int] = Counter()
    ids = []
    for row in rows:
        ids.append(row.sample_id + COPIES_APART * copies[row.sample_id])
        copies[row.sample_id] += 1
    if max(copies.values()) > MAX_COPIES:
        raise ValueError(
            f"a batch has one prompt {max(copies.values())} times, and a prompt gets at most "
            f"{MAX_COPIES} different answers: give its source less weight, or more prompts"
        )
    return ids


def bucket_of(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length` tokens.

    Raises:
        ValueError: none does.
    """
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise ValueError(
            f"a prompt of {length} tokens fits none of the buckets {buckets}: "
            "add a longer bucket or lower the maximum prompt length"
        )
    return min(fitting)


def round_up(length: int, pad_multiple: int) -> int:
    """The smallest multiple of `pad_multiple` that is at least `length`."""
    return -(-length // pad_multiple) * pad_multiple


def common_length(rows: Sequence[SftRow] | Sequence[PairRow], pad_multiple: int) -> int:
    """One length for all batches: that of the longest row, rounded up to `pad_multiple`."""
    return round_up(max(_length(row) for row in rows), pad_multiple)


def prompt_buckets(
    rows: Sequence[PromptRow], *, max_buckets: int, pad_multiple: int
) -> tuple[int, ...]:
    """Up to `max_buckets` lengths, multiples of `pad_multiple`, that hold about as many rows each.

    A program is compiled for each. The last holds the longest prompt.
    """
    lengths = np.array([len(row.tokens) for row in rows])
    shares = np.arange(1, max_buckets + 1) / max_buckets
    bounds = np.quantile(lengths, shares, method="higher")
    return tuple(sorted({round_up(int(bound), pad_multiple) for bound in bounds}))


def _length(row: SftRow | PairRow) -> int:
    if isinstance(row, PairRow):
        return max(len(row.chosen), len(row.rejected))
    return len(row.tokens)


def _text_batch(
    tokens: Sequence[np.ndarray], prompt_lengths: Sequence[int], batch_size: int, length: int
) -> TextBatch:
    return TextBatch(
        tokens_BT=_pad(tokens, batch_size, length),
        lengths_B=_fill([len(ids) for ids in tokens], batch_size),
        prompt_lengths_B=_fill(prompt_lengths, batch_size),
        valid_B=_valid(len(tokens), batch_size),
    )


def _pad(tokens: Sequence[np.ndarray], batch_size: int, length: int) -> np.ndarray:
    longest = max(map(len, tokens))
    if longest > length:
        raise ValueError(
            f"a row of {longest} tokens does not fit a batch of length {length}: "
            "use the longest row's length, or tokenise with a smaller max_length"
        )
    padded = np.zeros((batch_size, length), np.int32)
    for n in range(batch_size):
        ids = tokens[n] if n < len(tokens) else tokens[0]
        padded[n, : len(ids)] = ids
    return padded


def _fill(values: Sequence[float], batch_size: int, dtype: type = np.int32) -> np.ndarray:
    """`values`, then the first of them again up to `batch_size`."""
    assert 0 < len(values) <= batch_size
    filled = np.full(batch_size, values[0], dtype)
    filled[: len(values)] = values
    return filled


def _valid(num_rows: int, batch_size: int) -> np.ndarray:
    return (np.arange(batch_size) < num_rows).astype(np.float32)
