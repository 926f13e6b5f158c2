"""A reward model that has another tokenizer than the actor: it reads the answers as text.

A row is what step 2 would make of prompt and answer with the reward model's tokenizer (and its
chat template, where the data are conversations), EOS included where the answer ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from meshes.multihost import to_host
from meshes.reshard import put_batch
from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.records import Dialogue, Example, Record
from rlhf_jax.data.render import ChatFormat, Renderer
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.row_passes import ModelOnMesh, row_scores
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.params import ScalarModel
from rlhf_jax.models.scoring import take_window

SHORTEST = 64
"""Rows are padded to this many tokens times a power of two: a program is compiled for each."""


@dataclass(frozen=True)
class TextRows:
    """Rows of the reward model's tokens; `num_cut` of them lost the front of their prompt."""

    tokens: list[list[int]]
    num_cut: int


@dataclass(frozen=True)
class TextWriter:
    """Prompts and answers as the rows of one reward model, at most `room` tokens each.

    `score_eos` False leaves out what ends an answer, as where its action is not trained.
    """

    encoder: Encoder
    renderer: Renderer
    room: int
    score_eos: bool

    @classmethod
    def of(cls, model: Pretrained, chat_format: ChatFormat, *, score_eos: bool) -> "TextWriter":
        """The writer for a model; ValueError where its tokenizer has no EOS."""
        encoder = Encoder(model.tokenizer, model.cfg.stop_ids)
        renderer = Renderer(model.tokenizer, chat_format)
        return cls(encoder, renderer, model.cfg.max_positions, score_eos)

    def write(
        self, prompts: Sequence[PromptRow], answers: Sequence[str], ended: Sequence[bool]
    ) -> TextRows:
        """Rows of prompt, answer and (where it ended) EOS; the front of a prompt makes room.

        Raises:
            ValueError: a prompt is messages, and the tokenizer has no chat template.
        """
        examples = [example(*pair) for pair in zip(prompts, answers, strict=True)]
        records = [self.renderer.record(each, ("chosen",)) for each in examples]
        texts = self.encoder.ended([record.chosen for record in records], records)
        rows, num_cut = [], 0
        for prompt, answer, end in zip(self.encoder.prompts(records), texts, ended, strict=True):
            row = [*prompt, *(answer if end and self.score_eos else answer[:-1])]
            kept, over = self.encoder.num_special(prompt), len(row) - self.room
            num_cut += over > 0
            rows.append(row if over <= 0 else [*row[:kept], *row[kept + over :]])
        return TextRows(rows, num_cut)


def example(prompt: PromptRow, answer: str) -> Example:
    """Prompt and answer as a row of data."""
    if prompt.messages is None:
        return Record(prompt.prompt, chosen=answer)
    return Dialogue(prompt.messages, chosen=(prompt.said(answer),))


class TextScorer:
    """Scores rows of text; holds no parameters."""

    def __init__(self, writer: TextWriter, place: ModelOnMesh) -> None:
        self.write = writer.write
        self.room = writer.room
        self.layout = place.layout
        self.program: Any = jax.jit(partial(score_ends, place=place))

    def score(
        self, model: ScalarModel[jax.Array], rows: Sequence[Sequence[int]], batch_size: int
    ) -> np.ndarray:
        """The score at each row's last token; rows are filled up to `batch_size`."""
        length = min(bucket(max(map(len, rows))), self.room)
        tokens = np.zeros((batch_size, length), np.int32)
        last = np.zeros(batch_size, np.int32)
        for n, row in enumerate(rows):
            tokens[n, : len(row)] = row
            last[n] = len(row) - 1
        scores = self.program(model, *put_batch((tokens, last), self.layout))
        return to_host(scores)[: len(rows)]


def score_ends(
    model: ScalarModel[jax.Array], tokens_BT: jax.Array, last_B: jax.Array, *, place: ModelOnMesh
) -> jax.Array:
    """The score at one position of every row, `[B]`."""
    return take_window(row_scores(model, tokens_BT, place), last_B, 1, place.layout)[:, 0]


def bucket(length: int) -> int:
    """The length that a batch of rows is padded to."""
    size = SHORTEST
    while size < length:
        size *= 2
    return size
