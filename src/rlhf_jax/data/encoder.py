"""A tokenizer's ids, told apart into what it adds to a text and the text itself."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "\n"
"""Put in front of an answer to hide the tokenizer's mark of the begin, then taken off."""

BLOCK = 4096
"""Texts that are encoded at once (in parallel, by the tokenizer)."""


class Encoder:
    """A tokenizer's ids, told apart into what it adds to a text and the text itself.

    Attributes:
        prefix: ids in front of every text ([BOS] or []).
        eos_id: the one id that ends an answer.
        stop_ids: ids that end an answer where a chat template wrote them; `eos_id` is one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Collection[int] = ()):
        """Raises ValueError where the tokenizer has no EOS, or adds ids inside a text."""
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int) or eos < 0:
            raise ValueError(
                f"the tokenizer's EOS is {tokenizer.eos_token!r} with id {eos!r}, it must be one "
                "token: set `eos_token` in its tokenizer_config.json"
            )
        self.eos_id = eos
        self.stop_ids = frozenset([eos, *stop_ids])
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
        self._blank: dict[tuple[int, ...], bool] = {}

    def plain(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Ids of whole texts, nothing added."""
        return self._ids(texts, special=False)

    def prompts(self, records: Sequence[Record]) -> Iterator[list[int]]:
        """`prefix` and ids of every prompt; an empty one is the prefix alone.

        A chat template writes what stands in front of a text itself.
        """
        encoded = self.plain([record.prompt for record in records])
        for record, ids in zip(records, encoded, strict=True):
            yield ids if record.templated else self.prefix + ids

    def num_special(self, prompt: list[int]) -> int:
        """How many ids in front of a prompt are `prefix`."""
        size = len(self.prefix)
        return size if prompt[:size] == self.prefix else 0

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

    def ended(
        self, answers: Sequence[str | None], records: Sequence[Record]
    ) -> Iterator[list[int]]:
        """`answers` up to and with what ends them: EOS, or the stop token of a chat template.

        What a template writes behind that token (a line break) is never sampled, and left out.
        """
        for record, ids in zip(records, self.answers(answers, records), strict=True):
            stops = [n for n, i in enumerate(ids) if i in self.stop_ids] if record.templated else []
            if stops and self._is_blank(ids[stops[-1] + 1 :]):
                yield ids[: stops[-1] + 1]
            else:
                yield [*ids, self.eos_id]

    def ends_within(self, answer: list[int], record: Record) -> bool:
        """Whether text in an answer of `ended` became a token that ends it, and more follows.

        A chat template may write several turns, each with its end.
        """
        return not record.templated and not self.stop_ids.isdisjoint(answer[:-2])

    def _is_blank(self, ids: list[int]) -> bool:
        key = tuple(ids)
        if key not in self._blank:
            self._blank[key] = not str(self._tokenizer.decode(ids)).strip()
        return self._blank[key]

    def _behind(self, sentinel: list[int], ids: list[int], text: str) -> list[int]:
        if ids[: len(sentinel)] != sentinel:
            raise ValueError(
                f"the tokenizer merges a line break with the text behind it ({text[:40]!r}): "
                "an answer cannot be encoded apart from its prompt with this tokenizer"
            )
        return ids[len(sentinel) :]

    def _ids(self, texts: Sequence[str], *, special: bool) -> Iterator[list[int]]:
        """In blocks: lists of Python integers take nine times the memory of the rows."""
        for start in range(0, len(texts), BLOCK):
            block = list(texts[start : start + BLOCK])
            # verbose: it would warn of texts over the model's length, which are counted here.
            encoded = self._tokenizer(
                block, add_special_tokens=special, return_attention_mask=False, verbose=False
            )
            yield from encoded["input_ids"]  # pyright: ignore[reportReturnType]


def _present(answer: str | None) -> str:
    assert answer is not None, "the stage's shapes hold this answer: see records.require_stage"
    return answer


def text_behind(prompt: list[int], answer: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """The answer's text where it stands: decoded alone it may lose the space in front of it."""

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    before, whole = text(prompt), text(prompt + answer)
    return whole.removeprefix(before) if whole.startswith(before) else text(answer)
