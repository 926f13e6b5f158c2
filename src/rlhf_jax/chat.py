"""Talk to a trained model: `python -m rlhf_jax.chat runs/my-run`.

Answers go to stdout as they are made, everything else to stderr, so questions can come from a pipe,
one a line; a line that is refused gives an empty one. /clear forgets the conversation, /system TEXT
gives instructions, /quit leaves; ctrl-C stops an answer. Exit codes: 0 left, 1 an error that the
message explains or a pipe with a line that was refused, 2 wrong flags, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import count
from typing import TYPE_CHECKING, Annotated

import tyro

from rlhf_jax.inference.dtypes import LoadDtype

if TYPE_CHECKING:
    from rlhf_jax.inference.conversation import Conversation
    from rlhf_jax.inference.interrupts import Interrupts
    from rlhf_jax.inference.pieces import Limit
    from rlhf_jax.inference.session import Model

PROG = "python -m rlhf_jax.chat"
TRACEBACK = "RLHF_JAX_TRACEBACK"
LONGEST_CONTEXT = 2048
"""Tokens, where no --context is given."""
COMMANDS = "/clear forgets the conversation, /system TEXT gives instructions, /quit leaves"

type Answer = Callable[[Sequence[int]], Generator[str]]


@dataclass(frozen=True)
class ChatConfig:
    """What to talk to, and how it answers."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's directory (its actor/, else its dpo/ or sft/), a Hugging Face directory, a GGUF file
    or a Hub name."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""
    max_new_tokens: int | None = None
    """Longest answer; by default a quarter of the context, at most 256."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of the conversation so far become less likely."""
    seed: int = 0
    """The same seed and the same questions get the same answers."""
    system: str = ""
    """Instructions in front of the conversation, as /system gives them."""
    context: int | None = None
    """Tokens of history, question and answer together, at most; by default the model's positions,
    at most 2048."""
    turn_format: str | None = None
    """How a question is written, such as "Human: {} Assistant:"; \\n is a line break. By default as
    training asked it; else by the model's chat template; else "Human: {} Assistant:"."""
    mesh: str | None = None
    """FxT, such as 1x1 or 2x4; by default all visible devices."""
    dtype: LoadDtype = "float32"
    """What the weights are held in."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens={self.max_new_tokens} must be at least 1")
        if self.context is not None and self.context < 2:
            raise ValueError(f"--context={self.context} must hold a question and an answer")
        check_text(self.system, "--system")
        check_text(self.turn_format or "", "--turn-format")


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the input ends."""
    code = 2
    try:
        cfg = tyro.cli(ChatConfig, prog=PROG, description=__doc__, args=argv)
        code = 1
        return chat(cfg)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        tell("interrupted")
        return 130


def chat(cfg: ChatConfig) -> int:
    """Load the model and answer question after question. 1 where a line of a pipe was refused."""
    from rlhf_jax.inference.interrupts import Interrupts
    from rlhf_jax.inference.session import load

    model = load(cfg.model, mesh=cfg.mesh, dtype=cfg.dtype)
    if model.is_reward_model:
        raise ValueError(
            f"{model.name} is a reward model: it scores answers and gives none. Talk to the sft/ "
            "or actor/ of a run, or use rlhf_jax.load(…).score(texts)"
        )
    interactive, refused = sys.stdin.isatty(), 0
    if isinstance(sys.stdin, TextIOWrapper):  # a line that is no text is refused, and no other one
        sys.stdin.reconfigure(errors="surrogateescape")
    # ctrl-C in a script ends it, as everywhere; a person stops an answer, and leaves with a second.
    interrupts = Interrupts(enabled=interactive)
    conversation, answer, limit = prepare(cfg, model, interrupts)
    if interactive:
        greet(model.name, conversation)
    for question in questions(conversation, interactive):
        before = conversation.forgotten
        try:
            check_question(question)
            ids = conversation.prompt(question)
        except ValueError as error:
            tell(str(error))
            if not interactive:
                refused = 1
                print(flush=True)  # the n-th line is the answer to the n-th question
            continue
        if conversation.forgotten and not before:
            tell(f"(the oldest turns no longer fit in {conversation.room} tokens: forgotten)")
        with interrupts, closing(answer(ids)) as pieces:
            text = speak(pieces)
        if interrupts.came:
            tell("(stopped)")
        elif interactive and not text.strip():
            tell("(an empty answer)")
        elif interactive and limit.reached:
            tell(f"(cut off: --max-new-tokens={limit.longest})")
        conversation.record(question, text)
    return refused


def speak(pieces: Iterable[str]) -> str:
    """Prints an answer as it comes, trimmed; returns all of it as the model wrote it."""
    from rlhf_jax.inference.pieces import trimmed

    said: list[str] = []

    def noted() -> Iterator[str]:
        for piece in pieces:
            said.append(piece)
            yield piece

    for piece in trimmed(noted()):
        print(piece, end="", flush=True)
    print(flush=True)
    return "".join(said)


def prepare(
    cfg: ChatConfig, model: "Model", interrupts: "Interrupts"
) -> tuple["Conversation", Answer, "Limit"]:
    """The empty conversation, what turns a prompt into the pieces of an answer, and whether one
    was cut off.
    """
    from rlhf_jax.inference.conversation import SHORTEST_HISTORY, Conversation
    from rlhf_jax.inference.pieces import Limit, text_pieces, until
    from rlhf_jax.inference.places import choose_form
    from rlhf_jax.inference.rows import window_of

    positions = model.config.max_positions
    window = window_of("--context", cfg.context, LONGEST_CONTEXT, positions)
    longest = cfg.max_new_tokens or max(min(256, window // 4), 1)
    if longest >= window:
        raise ValueError(
            f"--max-new-tokens={longest} leaves no room for a question in {window} tokens: "
            "lower it, or raise --context if the model has more positions"
        )
    form = choose_form(model.tokenizer, model.name, cfg.turn_format)
    if form.note:
        tell(f"note: {form.note}")
    streamer = model.streamer(
        context=window,
        max_new_tokens=longest,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
    )
    seeds, limit = count(cfg.seed), Limit(longest, model.stop_ids)

    def answer(prompt: Sequence[int]) -> Generator[str]:
        tokens = limit.watch(streamer.tokens(prompt, seed=next(seeds)))
        chunks = interrupts.until_one_comes(tokens)
        pieces = text_pieces(model.tokenizer, prompt, chunks, model.stop_ids)
        return until(pieces, form.next_turn) if form.next_turn else pieces

    conversation = Conversation(form.encode, streamer.room, window >= SHORTEST_HISTORY)
    conversation.system = cfg.system
    return conversation, answer, limit


def greet(name: str, conversation: "Conversation") -> None:
    """What a person should know first."""
    tell(f"{name}: {COMMANDS}. The first answer compiles its programs and takes longer.")
    if not conversation.keeps_history:
        tell("The context is short: each turn stands alone.")


def questions(conversation: "Conversation", interactive: bool) -> Iterator[str]:
    """Lines to answer or refuse, until the input ends; commands are carried out here."""
    while True:
        line = read_line(interactive)
        if line is None or line.strip() == "/quit":
            return
        command, _, rest = line.strip().partition(" ")
        if command == "/clear" and not rest:
            conversation.clear()
            tell("(forgotten)")
        elif command == "/system" and is_text(rest):
            conversation.system = rest.strip()
            tell("(the instructions are set)" if rest.strip() else "(no instructions)")
        elif command:
            yield line.strip()


def check_question(line: str) -> None:
    """ValueError where a line is no text, or a command that there is not."""
    check_text(line, "that")
    if line.startswith("/"):
        raise ValueError(f"there is no command {line}: {COMMANDS}")


def check_text(text: str, what: str) -> None:
    """ValueError unless a text from outside was UTF-8."""
    if not is_text(text):
        raise ValueError(f"{what} is not UTF-8 text: convert it, as with `iconv -t UTF-8`")


def is_text(text: str) -> bool:
    """Whether every byte of it could be read: one that could not came as half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_line(interactive: bool) -> str | None:
    """The next line; None where the input ends. ctrl-C on a terminal only drops the line."""
    if not interactive:
        return sys.stdin.readline().removeprefix("\ufeff") or None  # as some editors begin UTF-8
    import readline  # noqa: F401  (editing and history for input())

    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            tell("\n(/quit or ctrl-D leaves)")


def tell(text: str) -> None:
    """A note to the person."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
