"""Lists of messages: read in the forms in which they are written, checked, and told apart.

OpenAI's form is `[{"role": "user", "content": "…"}]`, ShareGPT's
`[{"from": "human", "value": "…"}]`. A reason (a few words) in place of a record says why its row
is dropped.
"""

import sys
from collections.abc import Mapping, Sequence

from rlhf_jax.data.records import Conversation, Dialogue, Example, Message, Record, Text

FORMS = (("role", "content"), ("from", "value"))
"""The fields of a message, by OpenAI and by ShareGPT."""

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip
"""ShareGPT's speakers, and other names for the roles that templates know."""

ALLOWED = ("system", "developer", "user", "assistant", "tool")


def read_text(value: object, column: str, where: str) -> Text | None:
    """A column that holds text or messages; None where it, or the content of a message, is null.

    Raises:
        ValueError: anything else, or text that is no Unicode.
    """
    if value is None or isinstance(value, str):
        return value if value is None else check_unicode(value, f"{where}: column {column!r}")
    if isinstance(value, Mapping):
        # `datasets` reads a list of structs as a struct of lists where it is declared a Sequence.
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
        if len({len(item) for item in lists.values()}) == 1:
            value = [
                dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)
            ]
    if not isinstance(value, Sequence) or not value:
        what = "an empty list" if value == [] else _named(value)
        raise ValueError(f"{where}: column {column!r} holds {what}, not text or messages")
    place = f"{where}: column {column!r}, message"
    messages = [_message(item, f"{place} {n}") for n, item in enumerate(value)]
    whole = tuple(message for message in messages if message is not None)
    return whole if len(whole) == len(messages) else None


def _message(item: object, where: str) -> Message | None:
    if isinstance(item, Mapping):
        for role_field, content_field in FORMS:
            if role_field in item and content_field in item:
                role, content = item[role_field], item[content_field]
                if content is None:
                    return None
                if isinstance(role, str) and isinstance(content, str):
                    # Millions of messages share a handful of roles.
                    return Message(sys.intern(ROLES.get(role, role)), check_unicode(content, where))
                raise ValueError(f"{where}: {role_field} or {content_field} is not text")
    raise ValueError(
        f"{where}: {_named(item)}, not a message: it needs role and content (or from and value)"
    )


def _named(value: object) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def check_unicode(text: str, where: str) -> str:
    """The text; ValueError for half of a surrogate pair, which JSON can hold and no tokenizer
    takes.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: no Unicode text: half of a surrogate pair, {text[error.start]!r}, at "
                f"character {error.start + 1}. Take it out"
            ) from error
    return text


def as_messages(text: Text, role: str) -> Conversation:
    """A conversation as it is, text as one message of `role`."""
    return (Message(role, text),) if isinstance(text, str) else text


def fault(messages: Conversation) -> str | None:
    """Why messages are no prompt that a person asks and a model answers; None where they are.

    System messages may stand in front; then a person speaks first.
    """
    unknown = [message.role for message in messages if message.role not in ALLOWED]
    if unknown:
        return f"unknown role {unknown[0]!r}"
    spoken = [message.role for message in messages if message.role not in ("system", "developer")]
    if not spoken:
        return "no user turn"
    if spoken[0] != "user":
        return f"begins with a turn of {spoken[0]}"
    if spoken[-1] == "assistant":
        return "prompt ends with a turn of assistant"
    return None


def answer_fault(messages: Conversation) -> str | None:
    """Why messages are no answer; one may hold several turns, the first and last the model's."""
    if messages[0].role != "assistant" or messages[-1].role != "assistant":
        return "answer is no turn of assistant"
    return next((f"unknown role {m.role!r}" for m in messages if m.role not in ALLOWED), None)


def example_of(
    prompt: Text, chosen: Text | None = None, rejected: Text | None = None
) -> Example | str:
    """A prompt and its answers; text becomes messages where another part is."""
    if all(part is None or isinstance(part, str) for part in (prompt, chosen, rejected)):
        return Record(prompt, chosen, rejected)  # pyright: ignore[reportArgumentType]
    asked = as_messages(prompt, "user")
    good, bad = (
        None if part is None else as_messages(part, "assistant") for part in (chosen, rejected)
    )
    faults = [fault(asked), *(answer_fault(said) for said in (good, bad) if said is not None)]
    return next((why for why in faults if why), None) or Dialogue(asked, good, bad)


def split_messages(messages: Conversation) -> Example | str:
    """The last turn of the model is the answer; what stands behind it is left out."""
    last = max((n for n, m in enumerate(messages) if m.role == "assistant"), default=None)
    if last is None:
        return "no assistant turn"
    return example_of(messages[:last], messages[last : last + 1])


def split_common(chosen: Conversation, rejected: Conversation) -> Example | str:
    """Two whole conversations: the messages that both begin with are the prompt."""
    if chosen == rejected:
        return "answers are equal"
    pairs = zip(chosen, rejected, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if not same or same == min(len(chosen), len(rejected)) or chosen[same].role != "assistant":
        return "prompts differ"
    return example_of(chosen[:same], chosen[same:], rejected[same:])
