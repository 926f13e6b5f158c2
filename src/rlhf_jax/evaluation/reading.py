"""The rows of an evaluation: held-out ones where the data say so, else all."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from rlhf_jax.data.files import file_table, format_of
from rlhf_jax.data.records import Example, Record, Stage
from rlhf_jax.data.sources import load_source, local_path

DEFAULT_PROMPTS = (
    "What does the company Microsoft do? Answer in two or three sentences.",
    "Explain to a six-year-old why the moon looks different every night.",
    "Write a poem of four lines about a wise frog.",
    "Who was the first man on the moon, and when did he land?",
    "How can I make my morning routine healthier?",
    "Recommend a book to somebody who has liked every detective story so far.",
)
"""A fact, an explanation, a poem, a date, advice and taste."""


def read_rows(path: str, stage: Stage, max_rows: int | None) -> tuple[list[Example], str]:
    """The rows that a stage would hold out, or all where the data have no eval split, and what
    was read in words.

    Raises:
        ValueError, FileNotFoundError: as `load_source`.
    """
    source = load_source(path, split="eval", stage=stage)
    split = "held-out rows" if source else "all rows"
    source = source or load_source(path, split="train", stage=stage)
    assert source is not None, "only an eval split may be missing"
    rows = source.records[:max_rows]
    first = f", the first {len(rows)}" if len(rows) < len(source.records) else ""
    return list(rows), f"{source} ({split}{first})"


def read_prompts(path: str | None, max_rows: int | None) -> tuple[list[Example], str]:
    """Prompts: a line of a text file each, or of rows; without a path the built-in ones.

    Raises:
        ValueError: there are none, or what `load_source` raises.
        FileNotFoundError: as `load_source`.
    """
    if path is None:
        prompts = DEFAULT_PROMPTS[:max_rows]
        return [Record(prompt) for prompt in prompts], f"{len(prompts)} built-in prompts"
    file = local_path(path)
    if not is_text(file):
        return read_rows(path, "ppo", max_rows)
    lines = [str(row["text"]).strip() for _, row in file_table(file).rows]
    kept = [Record(line) for line in lines if line][:max_rows]
    if not kept:
        raise ValueError(f"{path} is empty: write a prompt in each line")
    return list(kept), f"{path}: {len(kept)} prompts"


def read_document(file: Path) -> str:
    """All of a text file.

    Raises:
        ValueError: it is empty, damaged or not UTF-8.
    """
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
            text = stream.read().decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: damaged, or not gzip: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: there is no text to evaluate")
    return text


def is_text(file: Path) -> bool:
    """Whether a path is a file of plain text."""
    return file.is_file() and format_of(file) == ".txt"


def left_out(**counts: int) -> dict[str, int]:
    """Why rows were left out, those reasons that there are."""
    return {reason: count for reason, count in counts.items() if count}


def check_any(rows: Sequence[object], what: str, why: object) -> None:
    """ValueError where no row is left."""
    if not rows:
        raise ValueError(f"no {what} is left to evaluate: {why}")
