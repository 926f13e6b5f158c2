"""Talk to a trained model: `python -m rlhf_jax.chat runs/my-run`.

Answers go to stdout, everything else to stderr, so questions can come from a pipe, one a line. On a
terminal /clear forgets the conversation and /quit leaves; ctrl-C stops an answer. Exit codes: 0
left, 1 an error that the message explains, 2 wrong flags, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from rlhf_jax.inference.conversation import Conversation
    from rlhf_jax.inference.session import Model

PROG = "python -m rlhf_jax.chat"
TRACEBACK = "RLHF_JAX_TRACEBACK"
COMMANDS = "/clear forgets the conversation, /quit leaves"
POLICIES = ("actor", "sft")
"""Where a run leaves its policies, the newest first."""


@dataclass(frozen=True)
class ChatConfig:
    """What to talk to, and how it answers."""

    model: Annotated[str, tyro.conf.Positional]
    """A run's directory (its actor/, else its sft/), a Hugging Face directory or a Hub name."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""
    max_new_tokens: int | None = None
    """Longest answer; by default a quarter of the context, at most 256."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is off."""
    seed: int = 0
    """The same seed and the same questions get the same answers."""
    context: int = 2048
    """Tokens of history, question and answer together, at most; the model may have fewer."""
    turn_format: str = "Human: {} Assistant:"
    """How the training data write a question; for models without a chat template. \\n is a line
    break."""
    mesh: str | None = None
    """FxT, such as 1x1 or 2x4; by default all visible devices."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the weights are held in."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens={self.max_new_tokens} must be at least 1")
        if self.context < 2:
            raise ValueError(f"--context={self.context} must hold a question and an answer")


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the input ends."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    code = 2
    try:
        cfg = tyro.cli(ChatConfig, prog=PROG, description=__doc__, args=argv)
        code = 1
        chat(cfg)
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    return 0


def chat(cfg: ChatConfig) -> None:
    """Load the model and answer question after question."""
    from rlhf_jax.inference.session import load

    directory = find_policy(cfg.model)
    model = load(directory, mesh=cfg.mesh, dtype=cfg.dtype)
    if model.is_reward_model:
        raise ValueError(
            f"{directory} is a reward model: it scores answers and gives none. Talk to the sft/ or "
            "actor/ of a run, or use rlhf_jax.load(…).score(texts)"
        )
    interactive = sys.stdin.isatty()
    conversation, answer = prepare(cfg, model)
    if interactive:
        greet(directory, conversation)
    with ThreadPoolExecutor(max_workers=1) as worker:
        for question in questions(conversation, interactive):
            before = conversation.forgotten
            try:
                ids = conversation.prompt(question)
            except ValueError as error:
                tell(str(error))
                continue
            if conversation.forgotten and not before:
                tell(f"(the oldest turns no longer fit in {conversation.room} tokens: forgotten)")
            text = run_interruptibly(worker, lambda ids=ids: answer(ids))
            if text is None:
                tell("(stopped)")
                continue
            print(text.strip(), flush=True)
            if interactive and not text.strip():
                tell("(an empty answer)")
            conversation.record(question, text)


def find_policy(name: str) -> str:
    """The newest policy of a run's directory; any other name as it is.

    Raises:
        FileNotFoundError: a directory that holds neither a model nor a run with a policy.
    """
    path = Path(name).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        return name
    for policy in POLICIES:
        if (path / policy / "config.json").is_file():
            return str(path / policy)
    raise FileNotFoundError(
        f"{path} holds no trained policy: there is no {' or '.join(f'{p}/' for p in POLICIES)} "
        "with a config.json in it (steps 3 and 1 of a run write them), and no config.json itself"
    )


def prepare(
    cfg: ChatConfig, model: "Model"
) -> tuple["Conversation", Callable[[Sequence[int]], str]]:
    """The empty conversation, and what turns a prompt into an answer.

    Every prompt is padded to all the room there is, so one program serves a whole conversation.
    """
    from rlhf_jax.inference.conversation import (
        SHORTEST_HISTORY,
        Conversation,
        encode_plain,
        encode_template,
    )

    window = min(cfg.context, model.config.max_positions)
    longest = cfg.max_new_tokens or max(min(256, window // 4), 1)
    if longest >= window:
        raise ValueError(
            f"--max-new-tokens={longest} leaves no room for a question in {window} tokens: "
            "lower it, or raise --context if the model has more positions"
        )
    tokenizer = model.tokenizer
    encode = (
        encode_template(tokenizer)
        if tokenizer.chat_template
        else encode_plain(tokenizer, cfg.turn_format.replace("\\n", "\n"))
    )
    room, seeds = window - longest, count(cfg.seed)

    def answer(prompt: Sequence[int]) -> str:
        (given,) = model.generate(
            [prompt],
            max_new_tokens=longest,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            top_k=cfg.top_k,
            seed=next(seeds),
            prompt_length=room,
        )
        return given.text

    return Conversation(encode, room, keeps_history=window >= SHORTEST_HISTORY), answer


def greet(directory: str, conversation: "Conversation") -> None:
    """What a person should know first."""
    tell(f"{directory}: {COMMANDS}. The first answer compiles its program and takes longer.")
    if not conversation.keeps_history:
        tell("The context is short: each turn stands alone.")


def questions(conversation: "Conversation", interactive: bool) -> Iterator[str]:
    """Lines to answer, until the input ends; commands are carried out here."""
    while True:
        line = read_line(interactive)
        if line is None or line.strip() == "/quit":
            return
        line = line.strip()
        if line == "/clear":
            conversation.clear()
            tell("(forgotten)")
        elif line.startswith("/"):
            tell(f"there is no command {line.split()[0]}: {COMMANDS}")
        elif line:
            yield line


def read_line(interactive: bool) -> str | None:
    """The next line; None where the input ends. ctrl-C on a terminal only drops the line."""
    if not interactive:
        return sys.stdin.readline() or None
    import readline  # noqa: F401  (editing and history for input())

    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            tell("\n(/quit or ctrl-D leaves)")


def run_interruptibly(worker: ThreadPoolExecutor, run: Callable[[], str]) -> str | None:
    """`run()` in the worker's thread; None where ctrl-C came first.

    A program on the device cannot be stopped: it ends behind the person's back, and the next
    answer waits for it.
    """
    future = worker.submit(run)
    try:
        return future.result()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        future.cancel()
        return None


def tell(text: str) -> None:
    """A note to the person."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
