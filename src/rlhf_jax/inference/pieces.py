"""Text that comes in pieces: tokens to characters, and where an answer begins and ends."""

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.encoder import text_behind

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole character (yet)."""


def text_pieces(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    chunks: Iterable[Sequence[int]],
    stop_ids: Collection[int],
) -> Generator[str]:
    """The text of tokens as they come; joined it is `Generation.text`.

    Bytes at the end that are no whole character wait for the tokens behind them. Where they never
    become one, some tokenizers (Llama 2's, Mistral's) take back the characters of bytes in front of
    them: those have been told, and stay.
    """
    front, answer, told = list(prompt), [], ""
    for chunk in chunks:
        answer += [token for token in chunk if token not in stop_ids]
        text = text_behind(front, answer, tokenizer).rstrip(BROKEN)
        if not told.startswith(text):
            yield text[common_length(told, text) :]
            told = text
    text = text_behind(front, answer, tokenizer)
    if not told.startswith(text):
        yield text[common_length(told, text) :]


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many tokens or characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


class Limit:
    """Whether the last answer was cut off at `longest` tokens.

    Attributes:
        reached: so; False while an answer comes, and where nobody waited for its end.
    """

    def __init__(self, longest: int, stop_ids: Collection[int]) -> None:
        self.longest, self.reached = longest, False
        self._stop_ids = stop_ids

    def watch(self, chunks: Iterable[list[int]]) -> Generator[list[int]]:
        """The tokens of an answer, as they come."""
        self.reached, count, last = False, 0, None
        for chunk in chunks:
            count += len(chunk)
            last = chunk[-1] if chunk else last
            yield chunk
        self.reached = count == self.longest and last not in self._stop_ids


def until(pieces: Iterable[str], stop: str) -> Generator[str]:
    """What stands before the first `stop`; the end of a piece that may begin one waits.

    Where it comes, `pieces` is not read any further.
    """
    held = ""
    for piece in pieces:
        before, found, _ = (held + piece).partition(stop)
        if found:
            yield before
            return
        kept = next((n for n in range(len(stop) - 1, 0, -1) if before.endswith(stop[:n])), 0)
        held = before[len(before) - kept :]
        if len(before) > kept:
            yield before[: len(before) - kept]
    if held:
        yield held


def trimmed(pieces: Iterable[str]) -> Generator[str]:
    """Without white space in front and behind."""
    started, space = False, ""
    for piece in pieces:
        text = space + piece if started else piece.lstrip()
        kept = text.rstrip()
        space = text[len(kept) :]
        if kept:
            started = True
            yield kept
