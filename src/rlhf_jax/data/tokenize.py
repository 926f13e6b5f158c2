"""Examples to rows of token ids.

A row of text is `ids(prompt) + ids(answer) + [eos]`. The prompt's ids start with what the
tokenizer puts in front of every text (BOS, or nothing) and never end with what it puts behind;
prompt and answer are encoded apart, so the ids of a prompt are the same in all three stages and in
a chat. A tokenizer that marks the begin of a text with a space (`▁`, SentencePiece) does not mark
the begin of an answer. EOS is put on by id: no text of it needs to be recognised.

A conversation is first written out as text (`render`). A chat template writes BOS and the token
that ends a turn itself, so neither is added again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlhf_jax.data.encoder import BLOCK, Encoder
from rlhf_jax.data.fields import UnusableRowError
from rlhf_jax.data.records import (
    NO_COLUMNS,
    Conversation,
    Dialogue,
    Example,
    Message,
    Record,
)
from rlhf_jax.data.render import ChatFormat, Renderer, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Overlong = Literal["drop", "cut", "cut_turns"]


@dataclass(frozen=True, slots=True, eq=False)
class SftRow:
    """`tokens` int32: `prompt_length` tokens of prompt, then the answer and its end (unless cut).

    `source` as in `Record`.
    """

    tokens: np.ndarray
    prompt_length: int
    source: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PairRow:
    """Two rows int32 that share their first `prompt_length` tokens.

    `margin` (0 where none is known) and `source` as in `Record`.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    prompt_length: int
    margin: float = 0.0
    source: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """A prompt to answer.

    Attributes:
        tokens: int32, BOS first where the tokenizer has one.
        sample_id: number of the record it was made of: the same however rows are batched.
        prompt: its text, for tables of samples and reward functions.
        columns: further columns of its row, for reward functions.
        source: as in `Record`.
        messages: what `prompt` was written from, where the data are conversations.
        gap: what their format writes between the prompt and what the assistant says.
    """

    tokens: np.ndarray
    sample_id: int
    prompt: str
    columns: Mapping[str, object] = NO_COLUMNS
    source: int = 0
    messages: Conversation | None = None
    gap: str = ""

    def said(self, answer: str) -> Message:
        """The assistant's message where the text of an answer is `answer`."""
        return Message("assistant", answer.removeprefix(self.gap))


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
        cut_turns: kept without the oldest turns of their prompt.
        refused: left out because they cannot be written out as text, by reason.
        ending_within: kept with an answer in which text became the token that ends it.
    """

    kept: int
    dropped: int
    cut: int
    empty: int
    equal: int
    max_length: int
    cut_turns: int = 0
    refused: Mapping[str, int] = NO_COLUMNS  # pyright: ignore[reportAssignmentType]
    ending_within: int = 0

    def __str__(self) -> str:
        parts = [f"{self.kept} rows"]
        if self.cut:
            parts.append(f"{self.cut} of them cut to {self.max_length} tokens")
        if self.cut_turns:
            parts.append(
                f"{self.cut_turns} of them without their oldest turns (over {self.max_length} "
                "tokens)"
            )
        if self.ending_within:
            parts.append(
                f"{self.ending_within} of them with text inside an answer that became the end "
                "token (training stops and goes on behind it)"
            )
        parts += [f"{count} dropped ({why})" for why, count in self.left_out.items()]
        return ", ".join(parts)

    @property
    def left_out(self) -> dict[str, int]:
        """How many records made no row, by reason."""
        known = {
            f"over {self.max_length} tokens": self.dropped,
            "empty": self.empty,
            "answers equal": self.equal,
        }
        return {why: n for why, n in known.items() if n} | dict(sorted(self.refused.items()))


def tokenize_sft(
    records: Sequence[Example],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
    chat_format: ChatFormat = "template",
    stop_ids: Collection[int] = (),
) -> tuple[list[SftRow], TokenizeReport]:
    """Rows of prompt and chosen answer.

    `cut` keeps the first `max_length` tokens, so EOS is lost; a prompt that alone fills them
    leaves no answer and is dropped either way. `cut_turns` leaves out the oldest turns of the
    prompt, whole, until the row fits. `stop_ids` are the model's.

    Raises:
        ValueError: the tokenizer has no EOS, or does not tell prompt and answer apart; or what
            `Renderer` raises.
    """
    writer = _Writer(tokenizer, max_length, overlong, chat_format, stop_ids)
    rows: list[SftRow] = []
    for _, text in writer.encode(records, "chosen"):
        (answer,) = text.answers
        if writer.admits(text, len(text.prompt)):
            row = writer.row(text.prompt, answer)
            rows.append(SftRow(row, len(text.prompt), text.record.source))
    return rows, writer.report(len(rows))


def tokenize_pairs(
    records: Sequence[Example],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
    chat_format: ChatFormat = "template",
    stop_ids: Collection[int] = (),
) -> tuple[list[PairRow], TokenizeReport]:
    """Rows of prompt and both answers; the longer one decides whether a pair is overlong.

    Raises:
        ValueError: as `tokenize_sft`.
    """
    writer = _Writer(tokenizer, max_length, overlong, chat_format, stop_ids)
    rows: list[PairRow] = []
    for _, text in writer.encode(records, "chosen", "rejected"):
        if not writer.admits(text, len(text.prompt)):
            continue
        chosen, rejected = (writer.row(text.prompt, ids) for ids in text.answers)
        if np.array_equal(chosen, rejected):
            writer.discard_equal(text)
            continue
        margin = text.record.margin or 0.0
        rows.append(PairRow(chosen, rejected, len(text.prompt), margin, text.record.source))
    return rows, writer.report(len(rows))


def tokenize_prompts(
    records: Sequence[Example],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    overlong: Overlong,
    chat_format: ChatFormat = "template",
    stop_ids: Collection[int] = (),
) -> tuple[list[PromptRow], TokenizeReport]:
    """Rows of prompts; `cut` takes tokens from the front, behind BOS: the question stands last.

    Raises:
        ValueError: as `tokenize_sft`.
    """
    writer = _Writer(tokenizer, max_length, overlong, chat_format, stop_ids)
    gap = writer.renderer.gap() if any(isinstance(each, Dialogue) for each in records) else ""
    rows: list[PromptRow] = []
    for sample_id, text in writer.encode(records):
        num_special = writer.encoder.num_special(text.prompt)
        if writer.admits(text, num_special):
            tail = text.prompt[num_special:][-(max_length - num_special) :]
            tokens = np.asarray([*text.prompt[:num_special], *tail], np.int32)
            record = text.record
            rows.append(
                PromptRow(
                    tokens, sample_id, record.prompt, record.columns, record.source,
                    messages=conversation_of(text.example), gap=gap,
                )
            )  # fmt: skip
    return rows, writer.report(len(rows))


def conversation_of(example: Example) -> Conversation | None:
    """The messages of a prompt that is a conversation."""
    return example.prompt if isinstance(example, Dialogue) else None


@dataclass(frozen=True, slots=True)
class _Encoded:
    """An example, its text and its ids; answers end in EOS or another stop token."""

    example: Example
    record: Record
    prompt: list[int]
    answers: tuple[list[int], ...]

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return len(self.prompt) + max(map(len, self.answers), default=0)


class _Writer:
    """Encodes examples, and counts what is left out and what is cut."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        overlong: Overlong,
        chat_format: ChatFormat,
        stop_ids: Collection[int],
    ):
        self.encoder = Encoder(tokenizer, stop_ids)
        self.renderer = Renderer(tokenizer, chat_format)
        self.max_length, self.overlong = max_length, overlong
        self.dropped = self.cut = self.empty = self.equal = self.cut_turns = 0
        self.ending_within = 0
        self.refused: dict[str, int] = {}

    def encode(self, examples: Sequence[Example], *answers: str) -> Iterator[tuple[int, _Encoded]]:
        """(number of the example, its text in ids), shortened by turns where that is asked for."""
        for numbered in batched(enumerate(examples), BLOCK):
            written = [(n, example, self._written(example, answers)) for n, example in numbered]
            kept = [(n, (example, record)) for n, example, record in written if record is not None]
            encoded = self._encoded([pair for _, pair in kept], answers)
            for (n, _), text in zip(kept, encoded, strict=True):
                long = text.length > self.max_length and self.overlong == "cut_turns"
                yield n, self._without_turns(text, answers) if long else text

    def _written(self, example: Example, answers: Sequence[str]) -> Record | None:
        try:
            return self.renderer.record(example, answers)
        except UnusableRowError as reason:
            self.refused[str(reason)] = self.refused.get(str(reason), 0) + 1
            return None

    def _encoded(
        self, written: Sequence[tuple[Example, Record]], answers: Sequence[str]
    ) -> Iterator[_Encoded]:
        records = [record for _, record in written]
        texts = [[getattr(record, name) for record in records] for name in answers]
        said = [self.encoder.ended(each, records) for each in texts]
        encoded = zip(written, self.encoder.prompts(records), *said, strict=True)
        for (example, record), prompt, *ids in encoded:
            yield _Encoded(example, record, prompt, tuple(ids))

    def _without_turns(self, text: _Encoded, answers: Sequence[str]) -> _Encoded:
        """The longest text of the example that fits; `text` itself where none does."""
        for shorter in shortened(text.example):
            record = self.renderer.record(shorter, answers)
            (candidate,) = self._encoded([(shorter, record)], answers)
            if candidate.length <= self.max_length:
                self.cut_turns += 1
                return candidate
        return text

    def admits(self, text: _Encoded, fixed: int) -> bool:
        """Whether a row is kept; one cut must have room behind its `fixed` first tokens."""
        # An answer of one token is its end alone.
        lengths = [len(ids) - 1 for ids in text.answers] or [len(text.prompt) - fixed]
        if not min(lengths):
            self.empty += 1
            return False
        over = text.length > self.max_length
        admitted = not over or (self.overlong == "cut" and fixed < self.max_length)
        self.dropped += not admitted
        self.cut += admitted and over
        self.ending_within += admitted and self._ends_within(text)
        return admitted

    def _ends_within(self, text: _Encoded) -> bool:
        room = self.max_length - len(text.prompt)
        return any(self.encoder.ends_within(ids[:room], text.record) for ids in text.answers)

    def discard_equal(self, text: _Encoded) -> None:
        """Count a pair that was admitted and has equal rows."""
        self.equal += 1
        self.cut -= text.length > self.max_length
        self.ending_within -= self._ends_within(text)

    def row(self, prompt: list[int], answer: list[int]) -> np.ndarray:
        """int32 ids of prompt and answer, at most the first `max_length`."""
        return np.asarray([*prompt, *answer][: self.max_length], np.int32)

    def report(self, kept: int) -> TokenizeReport:
        return TokenizeReport(
            kept, self.dropped, self.cut, self.empty, self.equal, self.max_length,
            self.cut_turns, self.refused, self.ending_within,
        )  # fmt: skip
