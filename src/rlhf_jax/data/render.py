"""Conversations as text: by the tokenizer's chat template, or as Anthropic's transcripts."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rlhf_jax.data.fields import UnusableRowError
from rlhf_jax.data.records import Conversation, Dialogue, Example, Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type ChatFormat = Literal["template", "human_assistant"]

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
"""What begins a question and an answer in Anthropic's transcripts."""

_MARKS = {"user": HUMAN, "assistant": ASSISTANT}


class Renderer:
    """Writes conversations as one model reads them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", chat_format: ChatFormat):
        self._tokenizer, self._format = tokenizer, chat_format

    def record(self, example: Example, answers: Collection[str]) -> Record:
        """The example as text, with those of its answers (`chosen`, `rejected`) that are named.

        Raises:
            UnusableRowError: the template, or the format, has no place for one of its messages.
            ValueError: the tokenizer has no chat template, or one that changes the prompt when an
                answer stands behind it.
        """
        if isinstance(example, Record):
            return example
        templated = self._format == "template"
        write = self._by_template if templated else _transcript
        prompt = write(example.prompt, asks=True)
        texts: dict[str, str] = {}
        for name in answers:
            whole = write((*example.prompt, *getattr(example, name)), asks=False)
            texts[name] = self._behind(prompt, whole)
        return Record(
            prompt,
            **texts,
            margin=example.margin,
            columns=example.columns,
            source=example.source,
            templated=templated,
        )

    def gap(self) -> str:
        """The white space that is written between a prompt and what the assistant says."""
        said = Dialogue((Message("user", "a"),), (Message("assistant", "a"),))
        try:
            text = self.record(said, ("chosen",)).chosen or ""
        except (UnusableRowError, ValueError):  # the template has no place for so little
            return ""
        return text[: len(text) - len(text.lstrip())]

    def _by_template(self, messages: Conversation, *, asks: bool) -> str:
        import jinja2

        if not self._tokenizer.chat_template:
            raise ValueError(
                "the data are conversations and the tokenizer has no chat template: use a model "
                "that has one, give columns of text (prompt, completion, chosen, …), or write "
                "them as Human:/Assistant: transcripts with --data.chat-format=human_assistant"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [message._asdict() for message in messages],
                add_generation_prompt=asks,
                tokenize=False,
            )
        except jinja2.TemplateError as error:
            raise UnusableRowError(f"the chat template refuses it: {error}") from error
        return str(text)

    def _behind(self, prompt: str, whole: str) -> str:
        if not whole.startswith(prompt):
            same = next(n for n in range(len(prompt)) if whole[n : n + 1] != prompt[n])
            raise ValueError(
                "the chat template writes a prompt in one way where it asks for an answer "
                f"({prompt[max(same - 20, 0) : same + 20]!r}) and in another where the answer "
                f"stands behind it ({whole[max(same - 20, 0) : same + 20]!r}): use another "
                "template, or --data.chat-format=human_assistant"
            )
        return whole[len(prompt) :]


def _transcript(messages: Conversation, *, asks: bool) -> str:
    """Anthropic's form; what the system says stands in front, as it is."""
    written: list[str] = []
    for role, content in messages:
        if role in ("system", "developer") and not any(mark in written for mark in _MARKS.values()):
            written.append(content)
        elif role in _MARKS:
            written += [_MARKS[role], " ", content]
        else:
            raise UnusableRowError(f"a transcript has no turn of {role}")
    return "".join([*written, ASSISTANT] if asks else written)


def shortened(example: Example) -> Iterator[Example]:
    """The example with ever fewer turns in its prompt: the oldest question and all up to the next
    go first, and what stands in front of the first question stays.
    """
    if isinstance(example, Dialogue):
        asked = [n for n, message in enumerate(example.prompt) if message.role == "user"]
        front = example.prompt[: asked[0]]
        for start in asked[1:]:
            yield replace(example, prompt=(*front, *example.prompt[start:]))
        return
    front, *turns = example.prompt.split(HUMAN)
    for first in range(1, len(turns)):
        yield replace(example, prompt="".join([front, *(HUMAN + turn for turn in turns[first:])]))
