"""Turns of a chat as one prompt that fits the context window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.tokenize import Encoder

PLACE = "{}"
QUICKSTART_FORMAT = "Human: {} Assistant:"
"""The quickstart's data are written so; an answer brings the space in front of it."""

SHORTEST_HISTORY = 128


@dataclass(frozen=True)
class Turn:
    """What the person said, and the answer as the model wrote it (None: still to come)."""

    question: str
    answer: str | None = None


type Encode = Callable[[Sequence[Turn]], list[int]]


def encode_plain(tokenizer: PreTrainedTokenizerBase, turn_format: str) -> Encode:
    """Prompts as the training data write them: `turn_format` with a question in place of `{}`.

    An answer stands directly behind, and a space before the next turn unless the format starts
    with one. A question that has the format already is taken as it is.

    Raises:
        ValueError: the format does not have one `{}`.
    """
    if turn_format.count(PLACE) != 1:
        raise ValueError(
            f"the format {turn_format!r} must have one {{}} for the question, such as "
            f"{QUICKSTART_FORMAT!r}"
        )
    head, tail = turn_format.split(PLACE)
    between = "" if turn_format[0].isspace() else " "
    encoder = Encoder(tokenizer)

    def written(turn: Turn) -> str:
        done = turn.question.startswith(head.strip()) and turn.question.endswith(tail.strip())
        question = turn.question if done else f"{head}{turn.question}{tail}"
        return question + (turn.answer or "").rstrip()

    def encode(turns: Sequence[Turn]) -> list[int]:
        return [*encoder.prefix, *next(encoder.plain([between.join(map(written, turns))]))]

    return encode


def encode_template(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Prompts by the chat template of the tokenizer.

    Raises:
        ValueError: the template cannot be run (tried here, before a person has asked).
    """

    def encode(turns: Sequence[Turn]) -> list[int]:
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer.strip()})
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except ImportError as error:
            raise ValueError(f"the model's chat template cannot be run: {error}") from error
        # The template writes every special token itself, the first one too.
        return tokenizer.encode(str(text), add_special_tokens=False)

    encode([Turn("a")])
    return encode


class Conversation:
    """The turns so far. They make prompts of at most `room` tokens: the oldest turns go first,
    each as a whole.

    Attributes:
        keeps_history: False where the window is too small for more than one turn.
        forgotten: how many turns no longer fit.
    """

    def __init__(self, encode: Encode, room: int, *, keeps_history: bool = True) -> None:
        self.room, self.keeps_history = room, keeps_history
        self._encode = encode
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._turns: list[Turn] = []
        self.forgotten = 0

    def prompt(self, question: str) -> list[int]:
        """Token ids of the turns that fit and this question; ValueError where it alone does not."""
        ids = self._encode([*self._turns, Turn(question)])
        while len(ids) > self.room:
            if not self._turns:
                raise ValueError(
                    f"that is {len(ids)} tokens, there is room for {self.room}: shorten it"
                )
            self._turns.pop(0)
            self.forgotten += 1
            ids = self._encode([*self._turns, Turn(question)])
        return ids

    def record(self, question: str, answer: str) -> None:
        """Remember a turn that is over."""
        if self.keeps_history:
            self._turns.append(Turn(question, answer))
