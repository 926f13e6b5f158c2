"""Text records to rows of token ids.

A row is `ids(prompt) + ids(answer) + [eos]`. The prompt's ids start with what the tokenizer puts
in front of every text (BOS, or nothing) and never end with what it puts behind; prompt and answer
are encoded apart, so the ids of a prompt are the same in all three stages and in a chat. A
tokenizer that marks the begin of a text with a space (`▁`, SentencePiece) does not mark the begin
of an answer. EOS is put on by id: no text of it needs to be recognised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlhf_jax.data.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Overlong = Literal["drop", "cut"]

_SENTINEL = "\n"
"""Put in front of an answer to hide the tokenizer's mark of the begin, then taken off."""

_BLOCK = 4096
"""Texts that are encoded at once (in parallel, by the tokenizer)."""


@dataclass(frozen=True, slots=True, eq=False)
class SftRow:
    """`tokens` int32: `prompt_length` tokens of prompt, then the answer and EOS (unless cut)."""

    tokens: np.ndarray
    prompt_length: int


@dataclass(frozen=True, slots=True, eq=False)
class PairRow:
    """Two rows int32 that share their first `prompt_length` tokens."""

    chosen: np.ndarray
    rejected: np.ndarray
    prompt_length: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """A prompt to answer.

    Attributes:
        tokens: int32, BOS first where the tokenizer has one.
        sample_id: number of the record it was made of: the same however rows are batched.
        prompt: its text, for tables of samples.
    """

    tokens: np.ndarray
    sample_id: int
    prompt: str


@dataclass(frozen=True)
class TokenizeReport:
    """What became of the records.

    Attributes:
        kept: rows made (those cut are among them).
        dropped: left out because they were over `max_length`.
        cut: shortened to `max_length`.
        empty: left out because prompt (PPO) or answer (SFT, either one of a pair) had no token.
        equal: pairs left out because both answers had, or were cut to, the same tokens.
        max_length: in tokens.
    """

    kept: int
    dropped: int
    cut: int
    empty: int
    equal: int
    max_length: int

    def __str__(self) -> str:
        parts = [f"{self.kept} rows"]
        if self.cut:
            parts.append(f"{self.cut} of them cut to {self.max_length} tokens")
        if self.dropped:
            parts.append(f"{self.dropped} dropped (over {self.max_length} tokens)")
        if self.empty:
            parts.append(f"{self.empty} dropped (empty)")
        if self.equal:
            parts.append(f"{self.equal} dropped (answers equal)")
        return ", ".join(parts)


def tokenize_sft(
    records: Sequence[Record],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
) -> tuple[list[SftRow], TokenizeReport]:
    """Rows of prompt and chosen answer.

    `cut` keeps the first `max_length` tokens, so EOS is lost; a prompt that alone fills them
    leaves no answer and is dropped either way.

    Raises:
        ValueError: the tokenizer has no EOS, or does not tell prompt and answer apart.
    """
    encoder = Encoder(tokenizer)
    answers = encoder.answers([record.chosen for record in records], records)
    tally = _Tally(max_length, overlong)
    rows: list[SftRow] = []
    for prompt, answer in zip(encoder.prompts(records), answers, strict=True):
        length = len(prompt) + len(answer) + 1
        if not answer:
            tally.empty += 1
        elif tally.admits(length, len(prompt)):
            rows.append(SftRow(encoder.row(prompt, answer, max_length), len(prompt)))
            tally.cut += length > max_length
    return rows, tally.report(len(rows))


def tokenize_pairs(
    records: Sequence[Record],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
) -> tuple[list[PairRow], TokenizeReport]:
    """Rows of prompt and both answers; the longer one decides whether a pair is overlong.

    Raises:
        ValueError: as `tokenize_sft`.
    """
    encoder = Encoder(tokenizer)
    chosen = encoder.answers([record.chosen for record in records], records)
    rejected = encoder.answers([record.rejected for record in records], records)
    tally = _Tally(max_length, overlong)
    rows: list[PairRow] = []
    for prompt, good, bad in zip(encoder.prompts(records), chosen, rejected, strict=True):
        longest = len(prompt) + max(len(good), len(bad)) + 1
        if not good or not bad:
            tally.empty += 1
        elif tally.admits(longest, len(prompt)):
            chosen_row, rejected_row = (encoder.row(prompt, ids, max_length) for ids in (good, bad))
            if np.array_equal(chosen_row, rejected_row):
                tally.equal += 1
                continue
            rows.append(PairRow(chosen_row, rejected_row, len(prompt)))
            tally.cut += longest > max_length
    return rows, tally.report(len(rows))


def tokenize_prompts(
    records: Sequence[Record],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
) -> tuple[list[PromptRow], TokenizeReport]:
    """Rows of prompts; `cut` takes tokens from the front, behind BOS: the question stands last.

    Raises:
        ValueError: as `tokenize_sft`.
    """
    encoder = Encoder(tokenizer)
    tally = _Tally(max_length, overlong)
    num_special = len(encoder.prefix)
    rows: list[PromptRow] = []
    for sample_id, (record, ids) in enumerate(zip(records, encoder.prompts(records), strict=True)):
        if len(ids) == num_special:
            tally.empty += 1
        elif tally.admits(len(ids), num_special):
            tail = ids[num_special:][-(max_length - num_special) :]
            tally.cut += len(ids) > max_length
            tokens = np.asarray([*encoder.prefix, *tail], np.int32)
            rows.append(PromptRow(tokens, sample_id, record.prompt))
    return rows, tally.report(len(rows))


class Encoder:
    """A tokenizer's ids, told apart into what it adds to a text and the text itself.

    Attributes:
        prefix: ids in front of every text ([BOS] or []).
        eos_id: the one id that ends an answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        """Raises ValueError where the tokenizer has no EOS, or adds ids inside a text."""
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int) or eos < 0:
            raise ValueError(
                f"the tokenizer's EOS is {tokenizer.eos_token!r} with id {eos!r}, it must be one "
                "token: set `eos_token` in its tokenizer_config.json"
            )
        self.eos_id = eos
        (plain,), (whole,) = (list(self._ids(["a"], special=special)) for special in (False, True))
        starts = [n for n in range(len(whole)) if plain and whole[n : n + len(plain)] == plain]
        if not starts:
            raise ValueError(
                f"the tokenizer encodes 'a' as {whole} with special tokens and {plain} without: "
                "what it adds must stand in front of and behind a text"
            )
        self.prefix: list[int] = whole[: starts[-1]]
        first = tokenizer.convert_ids_to_tokens(plain[0])
        self._marks_begin = isinstance(first, str) and first.startswith("▁")

    def plain(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Ids of whole texts, nothing added."""
        return self._ids(texts, special=False)

    def prompts(self, records: Sequence[Record]) -> Iterator[list[int]]:
        """`prefix` and ids of every prompt; an empty one is the prefix alone."""
        for ids in self.plain([record.prompt for record in records]):
            yield self.prefix + ids

    def answers(
        self, answers: Sequence[str | None], records: Sequence[Record]
    ) -> Iterator[list[int]]:
        """Ids of texts that go on behind the prompt of their record."""
        texts = [_present(answer) for answer in answers]
        if not self._marks_begin:
            yield from self.plain(texts)
            return
        # Behind an empty prompt an answer does begin a text.
        fronts = [_SENTINEL if record.prompt else "" for record in records]
        (sentinel,) = self.plain([_SENTINEL])
        encoded = self.plain([front + text for front, text in zip(fronts, texts, strict=True)])
        for front, text, ids in zip(fronts, texts, encoded, strict=True):
            yield self._behind(sentinel, ids, text) if front else ids

    def row(self, prompt: list[int], answer: list[int], max_length: int) -> np.ndarray:
        """int32 ids of prompt, answer and EOS, at most the first `max_length`."""
        return np.asarray([*prompt, *answer, self.eos_id][:max_length], np.int32)

    def _behind(self, sentinel: list[int], ids: list[int], text: str) -> list[int]:
        if ids[: len(sentinel)] != sentinel:
            raise ValueError(
                f"the tokenizer merges a line break with the text behind it ({text[:40]!r}): "
                "an answer cannot be encoded apart from its prompt with this tokenizer"
            )
        return ids[len(sentinel) :]

    def _ids(self, texts: Sequence[str], *, special: bool) -> Iterator[list[int]]:
        """In blocks: lists of Python integers take nine times the memory of the rows."""
        for start in range(0, len(texts), _BLOCK):
            block = list(texts[start : start + _BLOCK])
            # verbose: it would warn of texts over the model's length, which are counted here.
            encoded = self._tokenizer(
                block, add_special_tokens=special, return_attention_mask=False, verbose=False
            )
            yield from encoded["input_ids"]  # pyright: ignore[reportReturnType]


class _Tally:
    """Counts what is left out, and decides it for overlong rows."""

    def __init__(self, max_length: int, overlong: Overlong):
        self.max_length, self.overlong = max_length, overlong
        self.dropped = self.cut = self.empty = self.equal = 0

    def admits(self, length: int, fixed: int) -> bool:
        """Whether a row is kept; one cut must have room behind its `fixed` first tokens."""
        cuttable = self.overlong == "cut" and fixed < self.max_length
        admitted = length <= self.max_length or cuttable
        self.dropped += not admitted
        return admitted

    def report(self, kept: int) -> TokenizeReport:
        return TokenizeReport(kept, self.dropped, self.cut, self.empty, self.equal, self.max_length)


def _present(answer: str | None) -> str:
    assert answer is not None, "the stage's shapes hold this answer: see records.require_stage"
    return answer
