"""How the prompts of training data write a question, so that a chat can write it so too."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rlhf_jax.data.records import Dialogue, Example
from rlhf_jax.data.render import ASSISTANT, HUMAN, ChatFormat

PLACE = "{}"
"""Where the question stands in a format."""

BY_TEMPLATE = ""
"""The form of conversations that the tokenizer's chat template writes."""

EXAMPLES = 1000
"""How many are looked at."""

_HEAD = re.compile(r"\s*Human:[ ]*")
_TAIL = re.compile(r"\s*Assistant:\s*\Z")
_MARK_BEFORE = re.compile(r".*[:>\]\n]\s*", re.DOTALL)
_MARK_BEHIND = re.compile(r"([\n<\[].*|\s\S*)[:>\]\n]\s*\Z", re.DOTALL)


def trained_format(examples: Sequence[Example], chat_format: ChatFormat) -> str | None:
    r"""What most of the examples have: a format with a `{}`, or `BY_TEMPLATE`; None where there are
    no prompts.

    Texts that are no Human:/Assistant: transcripts have in common what stands in front of a
    question and behind it, if it looks like a mark: `"Q: {}\nA:"`. With nothing in common the
    format is `"{}"`.
    """
    some = examples[:: max(len(examples) // EXAMPLES, 1)]
    formats = [(_format_of(example, chat_format), example) for example in some if example.prompt]
    if not formats:
        return None
    most = Counter(form for form, _ in formats).most_common(1)[0][0]
    if most is not None:
        return most
    return common_format(str(example.prompt) for form, example in formats if form is None)


def _format_of(example: Example, chat_format: ChatFormat) -> str | None:
    """None for a text that is no transcript."""
    if not isinstance(example, Dialogue):
        return transcript_format(example.prompt)
    return BY_TEMPLATE if chat_format == "template" else f"{HUMAN} {PLACE}{ASSISTANT}"


def transcript_format(prompt: str) -> str | None:
    """`"Human: {} Assistant:"` of a transcript that asks so; None of any other text."""
    head, tail = _HEAD.search(prompt), _TAIL.search(prompt)
    return head.group() + PLACE + tail.group() if head and tail else None


def common_format(prompts: Iterable[str]) -> str:
    """What all prompts begin and end with around a `{}`, as far as these are marks.

    A mark ends with a colon, a bracket or a line break. Behind a question it begins with a line
    break or a bracket, or is one word: words that questions happen to share are no marks.
    """
    different = [prompt for prompt in dict.fromkeys(prompts) if prompt]
    if len(different) < 2:
        return PLACE
    head = _MARK_BEFORE.match(common_begin(different))
    begin = head.group() if head else ""
    backwards = [prompt[len(begin) :][::-1] for prompt in different]
    tail = _MARK_BEHIND.search(common_begin(backwards)[::-1])
    end = tail.group() if tail else ""
    return PLACE if PLACE in begin + end else begin + PLACE + end


def common_begin(texts: Sequence[str]) -> str:
    """What all texts begin with: as much as the first and the last of the alphabet share."""
    first, last = min(texts), max(texts)
    ends = (n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(ends, len(first))]
