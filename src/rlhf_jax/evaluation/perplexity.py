"""Perplexity: of running text in windows, or of the answers to prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.records import Example, Record
from rlhf_jax.data.sources import local_path
from rlhf_jax.data.tokenize import tokenize_sft
from rlhf_jax.evaluation.config import Perplexity
from rlhf_jax.evaluation.reading import check_any, is_text, read_document, read_rows
from rlhf_jax.inference.rows import window_of
from rlhf_jax.inference.session import Model, load

LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class Window:
    """Tokens that the model sees at once; those from `first` on are counted."""

    tokens: Sequence[int]
    first: int


def evaluate_perplexity(cfg: Perplexity) -> dict[str, Any]:
    """The report of a language model on text.

    Raises:
        ValueError: a reward model, no text, or a window that does not fit.
        FileNotFoundError: no such model or data.
    """
    examples, read = read_text(cfg)
    model = load(cfg.model, mesh=cfg.mesh, dtype=cfg.dtype)
    if model.is_reward_model:
        raise ValueError(
            f"{model.name} is a reward model, it has no perplexity: name a language model, such as "
            "the sft/ or actor/ of a run"
        )
    documents = [example for example in examples if is_document(example)]
    if documents and len(documents) < len(examples):
        raise ValueError(
            f"{cfg.data}: {len(documents)} of {len(examples)} rows have no prompt: evaluate rows "
            "with prompts and documents apart"
        )
    windows, facts = (
        text_windows(model, documents, cfg) if documents else answer_windows(model, examples, cfg)
    )
    check_any(windows, "text", f"{read}; {facts}")
    total, count = negative_log_likelihood(model, windows, cfg.batch_size)
    return {
        "command": "perplexity",
        "model": model.name,
        "data": read,
        "dtype": cfg.dtype,
        **facts,
        "windows": len(windows),
        "tokens": count,
        "nll": total / count,
        "perplexity": float(np.exp(total / count)),
    }


def read_text(cfg: Perplexity) -> tuple[list[Example], str]:
    """A text file as one document, or rows."""
    file = local_path(cfg.data)
    if not is_text(file):
        return read_rows(cfg.data, "sft", cfg.max_rows)
    if cfg.max_rows is not None:
        raise ValueError(
            f"--max-rows={cfg.max_rows} counts rows, and {cfg.data} is one document: leave it "
            "out, or give a shorter file"
        )
    text = read_document(file)
    return [Record("", text)], f"{cfg.data}: a document of {len(text)} characters"


def is_document(example: Example) -> bool:
    """Whether a row is text without a prompt."""
    return isinstance(example, Record) and not example.prompt


def text_windows(
    model: Model, documents: Sequence[Example], cfg: Perplexity
) -> tuple[list[Window], dict[str, Any]]:
    """Windows over every document, and how they were made."""
    encoder = Encoder(model.tokenizer)
    size = window_of("--window", cfg.window, LONGEST_WINDOW, model.config.max_positions)
    # Without a token in front the first one of a window has no prediction: it repeats one.
    overlap = max(cfg.overlap, 0 if encoder.prefix else 1)
    if overlap + len(encoder.prefix) >= size:
        raise ValueError(f"--overlap={overlap} leaves nothing new in a window of {size}: lower it")
    texts = [str(document.chosen) for document in documents]
    windows = [
        window for ids in encoder.plain(texts) for window in cut(ids, encoder.prefix, size, overlap)
    ]
    facts = {"counted": "text", "documents": len(documents), "window": size, "overlap": overlap}
    return windows, facts


def cut(ids: Sequence[int], prefix: Sequence[int], size: int, overlap: int) -> Iterator[Window]:
    """Windows of at most `size` tokens, each behind `prefix`. Every token is counted once, but one
    that nothing stands in front of.
    """
    room, start, counted = size - len(prefix), 0, 0
    while counted < len(ids):
        piece = ids[start : start + room]
        first = max(len(prefix) + counted - start, 1)
        if len(prefix) + len(piece) > first:
            yield Window([*prefix, *piece], first)
        counted = start + len(piece)
        start = counted - overlap


def answer_windows(
    model: Model, examples: Sequence[Example], cfg: Perplexity
) -> tuple[list[Window], dict[str, Any]]:
    """Rows of prompt and answer, as step 1 reads them: the answer and its end are counted."""
    positions = model.config.max_positions
    size = window_of("--window", cfg.window, positions, positions)
    rows, report = tokenize_sft(
        examples,
        model.tokenizer,
        max_length=size,
        overlong="drop",
        chat_format="template" if model.tokenizer.chat_template else "human_assistant",
        stop_ids=model.stop_ids,
    )
    windows = [Window(row.tokens.tolist(), max(row.prompt_length, 1)) for row in rows]
    return windows, {"counted": "answers", "rows": str(report), "window": size}


def negative_log_likelihood(
    model: Model, windows: Sequence[Window], batch_size: int
) -> tuple[float, int]:
    """Its sum over the tokens that are counted, and how many these are."""
    rows = [np.asarray(window.tokens, np.int32) for window in windows]
    logprobs = model.logprobs(rows, batch_size=batch_size)
    parts = [
        each[window.first - 1 :].astype(np.float64)
        for window, each in zip(windows, logprobs, strict=True)
    ]
    return -float(sum(part.sum() for part in parts)), sum(map(len, parts))
