"""What people pass in (texts or token ids) as checked rows, and rows in few shapes."""

from collections.abc import Iterator, Mapping, Sequence, Set, Sized

import jax
import numpy as np

from rlhf_jax.data.conversations import check_unicode
from rlhf_jax.data.encoder import Encoder

type Text = str | Sequence[int] | np.ndarray
"""A text, or the ids of its tokens, which are taken as they are."""

SHORTEST_BUCKET = 16


def encode(texts: Sequence[Text], encoder: Encoder, vocab_size: int) -> list[np.ndarray]:
    """int32 ids of each text: what the tokenizer puts in front (BOS), the text, nothing behind.

    Raises:
        ValueError: no list, an empty text, or ids that the model has no row for.
    """
    if isinstance(texts, str):
        raise ValueError(
            f"got one string ({texts[:20]!r}) where a list of texts is wanted: put it in []"
        )
    # It is gone through more than once, and in order: a generator would be empty the second time.
    if not isinstance(texts, Sized) or isinstance(texts, Mapping | Set):
        raise ValueError(
            f"got a {type(texts).__name__} where a list of texts is wanted: make it a list"
        )
    strings = ((n, text) for n, text in enumerate(texts) if isinstance(text, str))
    encoded = encoder.plain([check_unicode(text, f"text {number}") for number, text in strings])
    rows = []
    for number, text in enumerate(texts):
        is_string = isinstance(text, str)
        what = f"text {number}"
        ids = next(encoded) if is_string else text
        row = check_ids(ids, vocab_size, what, wanted="a string or a list of token ids")
        rows.append(np.asarray([*encoder.prefix, *row], np.int32) if is_string else row)
    return rows


def check_ids(
    ids: Sequence[int] | np.ndarray, vocab_size: int, what: str, wanted: str = "a list of token ids"
) -> np.ndarray:
    """Token ids as int32; ValueError where there are none, or some outside the vocabulary."""
    row = np.asarray(ids)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(f"{what} must be {wanted}, got {ids!r}")
    if not row.size:
        raise ValueError(f"{what} is empty: to start from nothing, pass the BOS token as [its id]")
    wrong = row[(row < 0) | (row >= vocab_size)]
    if wrong.size:
        raise ValueError(
            f"{what} has token id {wrong[0]}, the model's vocabulary is 0 to {vocab_size - 1}"
        )
    return row.astype(np.int32)


def check_rectangle(
    tokens: np.ndarray | Sequence[Sequence[int]], lengths: np.ndarray | Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """`tokens_BT` and `lengths_B` as arrays; ValueError where they do not belong together."""
    try:
        tokens_BT = np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            "tokens must be a rectangle [B, T]: pad shorter rows and pass their lengths"
        ) from error
    if tokens_BT.ndim != 2 or not tokens_BT.size:
        raise ValueError(f"tokens must have shape [B, T], got {list(tokens_BT.shape)}")
    rows, width = tokens_BT.shape
    lengths_B = np.full(rows, width) if lengths is None else np.asarray(lengths)
    whole = lengths_B.shape == (rows,) and np.issubdtype(lengths_B.dtype, np.integer)
    if not whole or lengths_B.min() < 1 or lengths_B.max() > width:
        raise ValueError(
            f"lengths must be {rows} whole numbers from 1 to {width}, one for each row, got "
            f"{lengths_B.tolist()}"
        )
    return tokens_BT, lengths_B


def check_fits(rows: Sequence[np.ndarray], max_new_tokens: int, max_positions: int) -> None:
    """ValueError for the first row that leaves no room for its answer in the position table."""
    for number, row in enumerate(rows):
        if len(row) + max_new_tokens > max_positions:
            asked, remedy = "", ""
            if max_new_tokens:
                asked = f" and an answer of up to {max_new_tokens}"
                remedy = " or lower max_new_tokens"
            raise ValueError(
                f"text {number} has {len(row)} tokens{asked}, the model has {max_positions} "
                f"positions: shorten it{remedy}"
            )


def window_of(flag: str, asked: int | None, usual: int, positions: int) -> int:
    """Tokens at once: `asked`, or what is usual; ValueError where the model has fewer positions."""
    if (asked or 0) > positions:
        raise ValueError(f"{flag}={asked} is more than the model's {positions} positions")
    return asked or min(usual, positions)


def bucket(length: int, limit: int) -> int:
    """The next power of two, at most `limit`: few lengths, so few programs compile."""
    return min(max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()), limit)


def batch_rows(count: int, divisor: int, limit: int) -> int:
    """Rows of the batches that `count` rows are cut into: `divisor` times a power of two.

    The first that holds them all, or the last that is not above `limit`.
    """
    rows = divisor
    while rows < count and rows * 2 <= limit:
        rows *= 2
    return rows


def chunks[Row](rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """The rows in order, `size` at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def dealt(count: int, shares: int) -> np.ndarray:
    """`count` rows in an order that gives each of `shares` equal parts as many of the first."""
    return np.arange(count).reshape(-1, shares).T.ravel()


def take_rows[Tree](tree: Tree, order: np.ndarray) -> Tree:
    """Arrays `[B, ...]` with their rows in another order."""
    return jax.tree.map(lambda array: array[order], tree)


def like_lengths(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """The numbers of all rows, `size` at a time, the shortest rows first."""
    return chunks(sorted(range(len(lengths)), key=lambda number: lengths[number]), size)
