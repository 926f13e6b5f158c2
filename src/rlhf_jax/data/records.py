"""One example: text, or a conversation that the model's chat template turns into text.

Text is used as it stands: a model reads `prompt` and, directly behind it, the answer. Nothing is
put in between, so a space or a line break that should be there belongs to the data. A conversation
stays a list of messages until it is tokenised: its form belongs to the tokenizer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

type Stage = Literal["sft", "reward", "ppo"]

NO_COLUMNS: Mapping[str, object] = MappingProxyType({})


class Message(NamedTuple):
    """One turn: `role` is system, user, assistant, …"""

    role: str
    content: str


type Conversation = tuple[Message, ...]
type Text = str | Conversation


@dataclass(frozen=True, slots=True)
class Record:
    """One example as text.

    Attributes:
        prompt: what is asked.
        chosen: the answer to imitate or to prefer.
        rejected: the other answer.
        margin: by how much the score of `chosen` should exceed that of `rejected`.
        columns: further columns of the row, kept for stage ppo alone: reward functions read them.
        source: number of its source in a weighted blend.
        templated: written by a chat template, special tokens included: the tokenizer adds none,
            and EOS only where no stop token ends an answer.
    """

    prompt: str
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None
    columns: Mapping[str, object] = NO_COLUMNS
    source: int = 0
    templated: bool = False


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One example as messages, with the fields of `Record`. `render.Renderer` writes it out."""

    prompt: Conversation
    chosen: Conversation | None = None
    rejected: Conversation | None = None
    margin: float | None = None
    columns: Mapping[str, object] = NO_COLUMNS
    source: int = 0


type Example = Record | Dialogue


def require_stage(records: Collection[Example], stage: Stage, where: str) -> None:
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
