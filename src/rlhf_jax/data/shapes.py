"""The shapes in which rows are written down, and the stages that take each shape."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rlhf_jax.data.conversations import example_of, split_common, split_messages
from rlhf_jax.data.records import Example, Record, Stage, Text
from rlhf_jax.data.render import ASSISTANT

MARGIN = "margin"
"""A column of this name beside two answers is the margin of their scores."""

LABEL = "label"
"""A column of this name beside a completion says whether it is a good one (TRL's unpaired type)."""

type Texts = Mapping[str, Text]


@dataclass(frozen=True)
class Shape:
    """One way to write an example down.

    Attributes:
        columns: what a row must have. Further columns go to reward functions.
        stages: which stages can use it.
        convert: the record of a row, or the reason (a few words) why the row is dropped.
    """

    columns: tuple[str, ...]
    stages: tuple[Stage, ...]
    convert: Callable[[Texts], Example | str]

    @property
    def name(self) -> str:
        """`prompt+chosen+rejected`."""
        return "+".join(self.columns)


def pair_of(prompt: Text, chosen: Text, rejected: Text) -> Example | str:
    """A prompt and two answers."""
    if not isinstance(chosen, str) and chosen[0].role != "assistant":
        # As UltraFeedback: the prompt stands in the answers once more, as messages.
        return split_pair(chosen, rejected)
    return example_of(prompt, chosen, rejected)


def split_pair(chosen: Text, rejected: Text) -> Example | str:
    """Two wholes, texts or conversations, of prompt and answer."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return split_transcripts(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        return "one answer is text, the other messages"
    return split_common(chosen, rejected)


def split_transcripts(chosen: str, rejected: str) -> Example | str:
    """Two whole texts: what stands before the last answer is the prompt.

    Texts without `ASSISTANT` share as a prompt all that both begin with, up to the last white
    space.
    """
    if chosen == rejected:
        return "answers are equal"
    prompt, marker, good = chosen.rpartition(ASSISTANT)
    other_prompt, other_marker, bad = rejected.rpartition(ASSISTANT)
    if not marker and not other_marker:
        cut = _common_words(chosen, rejected)
        return Record(chosen[:cut], chosen=chosen[cut:], rejected=rejected[cut:])
    if not marker or not other_marker:
        return "no assistant turn"
    if prompt != other_prompt:
        return "prompts differ"
    return Record(prompt + ASSISTANT, chosen=good, rejected=bad)


def _common_words(chosen: str, rejected: str) -> int:
    """Where the last white space stands in front of which both texts are equal; else 0.

    Words are not cut apart, and the space goes to the answer, as tokenizers have it.
    """
    shorter = min(len(chosen), len(rejected)) - 1
    same = next((n for n in range(shorter) if chosen[n] != rejected[n]), shorter)
    spaces = [n for n in range(same + 1) if chosen[n].isspace() and rejected[n] == chosen[n]]
    return spaces[-1] if spaces else 0


def _pair(row: Texts) -> Example | str:
    return pair_of(row["prompt"], row["chosen"], row["rejected"])


def _transcripts(row: Texts) -> Example | str:
    return split_pair(row["chosen"], row["rejected"])


def _completion(row: Texts) -> Example | str:
    return example_of(row["prompt"], row["completion"])


def _prompt(row: Texts) -> Example | str:
    return example_of(row["prompt"])


def _text(row: Texts) -> Example | str:
    text = row["text"]
    return Record("", text) if isinstance(text, str) else "messages in column 'text'"


def _messages(column: str) -> Shape:
    def convert(row: Texts) -> Example | str:
        messages = row[column]
        return (
            f"text in column {column!r}" if isinstance(messages, str) else split_messages(messages)
        )

    return Shape((column,), ("sft", "ppo"), convert)


SHAPES: tuple[Shape, ...] = (
    Shape(("prompt", "chosen", "rejected"), ("sft", "reward", "ppo"), _pair),
    Shape(("prompt", "completion"), ("sft", "ppo"), _completion),
    Shape(("chosen", "rejected"), ("sft", "reward", "ppo"), _transcripts),
    _messages("messages"),
    _messages("conversations"),
    _messages("conversation"),
    Shape(("text",), ("sft",), _text),
    Shape(("prompt",), ("ppo",), _prompt),
)
"""A row that fits several shapes is read as the first one that the stage takes."""


def shapes_of(stage: Stage) -> tuple[Shape, ...]:
    """The shapes that `stage` takes."""
    return tuple(shape for shape in SHAPES if stage in shape.stages)


def shape_for(columns: Collection[str], stage: Stage, where: str) -> Shape:
    """The shape in which `stage` reads rows with these columns; `where` names their file.

    Raises:
        ValueError: the columns fit no shape, or none that the stage takes.
    """
    fitting = [shape for shape in SHAPES if set(shape.columns) <= set(columns)]
    usable = [shape for shape in fitting if stage in shape.stages]
    if usable:
        return usable[0]
    takes = ", ".join(shape.name for shape in shapes_of(stage))
    if fitting:
        further = ", ".join(sorted(set(columns) - set(fitting[0].columns)))
        raise ValueError(
            f"{where}: its rows are {fitting[0].name}{further and f' (with {further})'}, which "
            f"stage {stage} cannot use: it takes {takes}. Give {stage} other data, or rename or "
            "add columns"
        )
    there = ", ".join(sorted(columns)) or "none"
    allowed = ", ".join(shape.name for shape in SHAPES)
    raise ValueError(
        f"{where}: a column is missing. The columns there are: {there}. "
        f"Allowed are {allowed}; stage {stage} takes {takes}. Rename or add columns"
    )


def with_margin(record: Example, margin: object, where: str) -> Example:
    """The record with the margin of its row; null: none is known.

    Raises:
        ValueError: it is no finite number.
    """
    if margin is None:
        return record
    if isinstance(margin, int | float) and not isinstance(margin, bool):
        value = float(margin)
        if abs(value) < float("inf"):
            return replace(record, margin=value)
    raise ValueError(f"{where}: column {MARGIN!r} holds {margin!r}, not a finite number")


def is_good(label: object, where: str) -> bool:
    """What the label of a row says of its completion.

    Raises:
        ValueError: it is neither a boolean nor 0 or 1.
    """
    if label not in (0, 1):
        raise ValueError(
            f"{where}: column {LABEL!r} holds {label!r}, not true or false. Beside a completion it "
            "says whether that is a good one: rename a column that does not"
        )
    return bool(label)
