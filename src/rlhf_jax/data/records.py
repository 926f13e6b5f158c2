"""A row of text, the shapes in which rows are written down, and the stages that take each shape.

Text is used as it stands: a model reads `prompt` and, directly behind it, the answer. Nothing is
put in between, so a space or a line break that should be there belongs to the data.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

type Stage = Literal["sft", "reward", "ppo"]

ASSISTANT = "\n\nAssistant:"
"""What begins an answer in Anthropic's transcripts."""


@dataclass(frozen=True, slots=True)
class Record:
    """One example as text. `chosen` is the answer to imitate or to prefer, `rejected` the other."""

    prompt: str
    chosen: str | None = None
    rejected: str | None = None


@dataclass(frozen=True)
class Shape:
    """One way to write an example down.

    Attributes:
        columns: what a row must have; further columns are ignored.
        stages: which stages can use it.
        convert: the record of a row, or the reason (a few words) why the row is dropped.
    """

    columns: tuple[str, ...]
    stages: tuple[Stage, ...]
    convert: Callable[[Mapping[str, str]], Record | str]

    @property
    def name(self) -> str:
        """`prompt+chosen+rejected`."""
        return "+".join(self.columns)


def _pair(row: Mapping[str, str]) -> Record | str:
    return Record(row["prompt"], chosen=row["chosen"], rejected=row["rejected"])


def _transcripts(row: Mapping[str, str]) -> Record | str:
    """Two transcripts that differ in the last answer: what stands before it is the prompt."""
    prompt, marker, chosen = row["chosen"].rpartition(ASSISTANT)
    other_prompt, other_marker, rejected = row["rejected"].rpartition(ASSISTANT)
    if not marker or not other_marker:
        return "no assistant turn"
    if prompt != other_prompt:
        return "prompts differ"
    if chosen == rejected:
        return "answers are equal"
    return Record(prompt + ASSISTANT, chosen=chosen, rejected=rejected)


def _completion(row: Mapping[str, str]) -> Record | str:
    return Record(row["prompt"], chosen=row["completion"])


def _prompt(row: Mapping[str, str]) -> Record | str:
    return Record(row["prompt"])


def _text(row: Mapping[str, str]) -> Record | str:
    return Record("", chosen=row["text"])


SHAPES: tuple[Shape, ...] = (
    Shape(("prompt", "chosen", "rejected"), ("sft", "reward", "ppo"), _pair),
    Shape(("prompt", "completion"), ("sft", "ppo"), _completion),
    Shape(("chosen", "rejected"), ("sft", "reward", "ppo"), _transcripts),
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
        raise ValueError(
            f"{where}: its rows are {fitting[0].name}, which stage {stage} cannot use: "
            f"it takes {takes}. Give {stage} other data, or add the missing columns"
        )
    there = ", ".join(sorted(columns)) or "none"
    allowed = ", ".join(shape.name for shape in SHAPES)
    raise ValueError(
        f"{where}: a column is missing. The columns there are: {there}. "
        f"Allowed are {allowed}; stage {stage} takes {takes}. Rename or add columns"
    )


def require_stage(records: Collection[Record], stage: Stage, where: str) -> None:
    """Check that records made in code have the fields that `stage` reads.

    Raises:
        ValueError: one lacks `chosen` (sft, reward) or `rejected` (reward).
    """
    needed = {"sft": ("chosen",), "reward": ("chosen", "rejected"), "ppo": ()}
    for name in needed[stage]:
        without = sum(getattr(record, name) is None for record in records)
        if without:
            raise ValueError(
                f"{where}: {without} of {len(records)} records have no `{name}`, "
                f"which stage {stage} needs"
            )
