"""Turns of a chat as one prompt that fits the context window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.turn_format import PLACE

TURN_FORMAT = "Human: {} Assistant:"
"""How the quickstart's data are written, and DeepSpeed-Chat's; an answer brings the space in front
of it."""

SHORTEST_HISTORY = 128


@dataclass(frozen=True)
class Turn:
    """What the person said, and the answer as the model wrote it (None: still to come)."""

    question: str
    answer: str | None = None


type Encode = Callable[[Sequence[Turn], str], list[int]]
"""Token ids of turns behind the system's instructions (`""`: there are none)."""


@dataclass(frozen=True)
class Form:
    """How a model is asked.

    Attributes:
        encode: turns to a prompt.
        next_turn: text with which a model that does not stop goes on to the person's next turn;
            empty where none is known.
        note: what a person should know where nothing but a guess stands behind it; else empty.
    """

    encode: Encode
    next_turn: str = ""
    note: str = ""


def by_turns(tokenizer: PreTrainedTokenizerBase, turn_format: str) -> Form:
    """Prompts as training data write them: `turn_format` with a question in place of `{}`.

    An answer stands directly behind. Before the next turn stands a line break if one stands before
    the answer, else a space; neither if the format starts with white space. Instructions stand in
    front. A question that has the format already is taken as it is.

    Raises:
        ValueError: the format does not have one `{}`.
    """
    if turn_format.count(PLACE) != 1:
        raise ValueError(
            f"the format {turn_format!r} must have one {{}} for the question, such as "
            f"{TURN_FORMAT!r}"
        )
    head, tail = turn_format.split(PLACE)
    between = "" if turn_format[0].isspace() else "\n" if "\n" in tail else " "
    encoder = Encoder(tokenizer)

    def written(turn: Turn) -> str:
        front, behind, asked = head.strip(), tail.strip(), turn.question.strip()
        if not front + behind:  # white space alone: it has to be there as it is
            front, behind, asked = head, tail, turn.question
        done = asked.startswith(front) and asked.endswith(behind)
        question = turn.question if done else f"{head}{turn.question}{tail}"
        return question + (turn.answer or "").rstrip()

    def encode(turns: Sequence[Turn], system: str) -> list[int]:
        parts = [system] if system else []
        text = between.join([*parts, *map(written, turns)])
        return [*encoder.prefix, *next(encoder.plain([text]))]

    return Form(encode, head.strip())


def by_template(tokenizer: PreTrainedTokenizerBase) -> Form:
    """Prompts by the chat template of the tokenizer.

    Raises:
        ValueError: the template cannot be run (tried here, before a person has asked).
    """

    def encode(turns: Sequence[Turn], system: str) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer.strip()})
        try:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (ImportError, jinja2.TemplateError) as error:
            raise ValueError(f"the model's chat template cannot be run: {error}") from error
        # The template writes every special token itself, the first one too.
        return tokenizer.encode(str(text), add_special_tokens=False)

    encode([Turn("a")], "")
    return Form(encode)


class Conversation:
    """The turns so far. They make prompts of at most `room` tokens: the oldest turns go first,
    each as a whole.

    Attributes:
        system: instructions in front of the turns, which stay there; empty: none.
        keeps_history: False where the window is too small for more than one turn.
        forgotten: how many turns no longer fit.
    """

    def __init__(self, encode: Encode, room: int, keeps_history: bool = True) -> None:
        self.room, self.keeps_history, self.system = room, keeps_history, ""
        self._encode = encode
        self.clear()

    def clear(self) -> None:
        """Forget the turns; the instructions stay."""
        self._turns: list[Turn] = []
        self.forgotten = 0

    def prompt(self, question: str) -> list[int]:
        """Token ids of the turns that fit and this question.

        Raises:
            ValueError: it does not fit alone (nothing is forgotten then), or the chat template
                cannot be run.
        """
        turn = Turn(question)
        alone = self._encode([turn], self.system)
        if len(alone) > self.room:
            raise ValueError(
                f"that is {len(alone)} tokens, there is room for {self.room}: shorten it"
            )
        while len(ids := self._encode([*self._turns, turn], self.system)) > self.room:
            self._turns.pop(0)
            self.forgotten += 1
        return ids

    def record(self, question: str, answer: str) -> None:
        """Remember a turn that is over; one without an answer leaves nothing."""
        if self.keeps_history and answer.strip():
            self._turns.append(Turn(question, answer))
