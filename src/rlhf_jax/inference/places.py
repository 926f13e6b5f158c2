"""Where a run leaves its models, and how it asked them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.turn_format import transcript_format
from rlhf_jax.hf.gguf import find_gguf
from rlhf_jax.hf.hub import is_model
from rlhf_jax.hf.tokenizer import turn_format_of
from rlhf_jax.inference.conversation import TURN_FORMAT, Form, by_template, by_turns

POLICIES = ("actor", "dpo", "sft")
"""The directories of a run's policies, the newest first."""

REWARD = "reward"


def find_policy(name: str) -> str:
    """The newest policy of a run's directory; any other name as it is.

    Raises:
        FileNotFoundError: a directory that holds neither a model nor a run with a policy.
    """
    return _find(name, POLICIES, "trained policy", "steps 3, dpo and 1 of a run write them")


def find_reward(name: str) -> str:
    """The reward model of a run's directory; any other name as it is.

    Raises:
        FileNotFoundError: a directory that holds neither a model nor a run with a reward model.
    """
    return _find(name, (REWARD,), "reward model", "step 2 of a run writes it")


def _find(name: str, folders: tuple[str, ...], kind: str, writers: str) -> str:
    path = Path(name).expanduser()
    if not path.is_dir() or is_model(path):
        return name
    for folder in folders:
        if is_model(path / folder):
            return str(path / folder)
    if find_gguf(path):
        return name
    there = [folder for folder in (*POLICIES, REWARD) if is_model(path / folder)]
    hint = f". It holds {', '.join(f'{folder}/' for folder in there)}" if there else ""
    raise FileNotFoundError(
        f"{path} holds no {kind}: there is no {' or '.join(f'{folder}/' for folder in folders)} "
        f"with a config.json in it ({writers}), no config.json itself and no GGUF file{hint}"
    )


SAMPLES = 32
"""Prompts of a table that are looked at."""


def sampled_turn_format(name: str) -> str | None:
    """How the run that made a model writes a question, by the prompts of its sample tables.

    None where the model is none of a run's, or its prompts are no Human:/Assistant: transcripts.
    """
    formats: Counter[str | None] = Counter()
    for table in sorted(Path(name).expanduser().parent.glob("samples/*.jsonl")):
        with table.open(encoding="utf-8", errors="replace") as lines:
            for line, _ in zip(lines, range(SAMPLES), strict=False):
                if (prompt := prompt_in(line)) is not None:
                    formats[transcript_format(prompt)] += 1
    found = formats.most_common(1)
    return found[0][0] if found else None


def prompt_in(line: str) -> str | None:
    """The prompt in a line of a sample table; None in one of another file, or in half a line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    return prompt if isinstance(prompt, str) else None


def choose_form(
    tokenizer: PreTrainedTokenizerBase, name: str, turn_format: str | None = None
) -> Form:
    """How a model is asked: as `turn_format` says, else as it was trained by what its tokenizer or
    its run's prompts say, else by its chat template, else as `TURN_FORMAT`. Backslash and n make
    a line break.

    Raises:
        ValueError: a format without its place, a template that cannot be run.
    """
    if turn_format is not None:
        return by_turns(tokenizer, turn_format.replace("\\n", "\n"))
    trained = turn_format_of(tokenizer) or sampled_turn_format(name)
    if trained is not None:
        return by_turns(tokenizer, trained)
    if tokenizer.chat_template:
        return by_template(tokenizer)
    note = (
        f"{name} has no chat template, and nothing tells how it was trained: it is asked as "
        f"{TURN_FORMAT!r} (--turn-format changes that). A model that was never trained on "
        "dialogues just goes on with the text"
    )
    return replace(by_turns(tokenizer, TURN_FORMAT), note=note)
