"""The prompts of step 3: batches to answer in training, and held-out ones for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlhf_jax.data.batches import (
    COPIES_APART,
    PromptBatch,
    TextBatch,
    bucket_of,
    collate_prompts,
    prompt_buckets,
)
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.tokenize import PromptRow, tokenize_prompts
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.stages.ptx import ptx_loader
from rlhf_jax.stages.rows import stage_rows
from rlhf_jax.stages.run import Run

PAD_MULTIPLE = 8
"""Buckets are multiples of this many tokens."""


@dataclass(frozen=True)
class PromptData:
    """`held_out` are the rows behind the batches of `evaluation`, in order; `rows` those behind
    the batches of `train`, by sample id; `ptx` is pretraining
    text, one batch an update.
    """

    train: Loader[PromptBatch]
    evaluation: list[PromptBatch]
    held_out: list[PromptRow]
    max_prompt: int
    rows: Mapping[int, PromptRow]
    ptx: Loader[TextBatch] | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of all rows that train, by what they are: what a resume compares."""
        loaders = {"data": self.train, "pretraining text": self.ptx}
        return {what: one.fingerprint for what, one in loaders.items() if one is not None}


def with_all_columns(*parts: Sequence[PromptRow]) -> list[list[PromptRow]]:
    """Rows that all have every further column, None where their source lacks it: a reward function
    gets the same ones whatever rows are in a batch.
    """
    names = dict.fromkeys(name for rows in parts for row in rows for name in row.columns)
    return [
        [
            row
            if len(row.columns) == len(names)
            else replace(row, columns={name: row.columns.get(name) for name in names})
            for row in rows
        ]
        for rows in parts
    ]


def ppo_data(run: Run, actor: Pretrained) -> PromptData:
    """Reads, tokenises and batches prompts. Where nothing is held out, evaluation is empty."""
    cfg = run.cfg.ppo
    read = stage_rows(run, "ppo", actor, tokenize_prompts)
    rows, held_out = read.train, read.held_out[: cfg.num_eval_prompts]
    if rows[-1].sample_id >= COPIES_APART:
        raise ValueError(
            f"step 3 numbers up to {COPIES_APART} prompts, the data have {rows[-1].sample_id + 1}: "
            "lower --data.max-rows"
        )
    buckets = prompt_buckets(
        [*rows, *held_out], max_buckets=cfg.max_prompt_buckets, pad_multiple=PAD_MULTIPLE
    )
    buckets = tuple(sorted({min(bucket, cfg.max_prompt_seq_len) for bucket in buckets}))
    collate = partial(collate_prompts, buckets=buckets)
    train = Loader(
        rows,
        collate,
        batch_size=cfg.batch_size,
        seed=run.cfg.seed,
        group_of=lambda row: bucket_of(len(row.tokens), buckets),
        mixture=read.mixture,
    )
    starts = range(0, len(held_out), cfg.batch_size)
    evaluation = [collate(held_out[n : n + cfg.batch_size], cfg.batch_size) for n in starts]
    complete, held_out = with_all_columns(rows, held_out)
    by_id = {row.sample_id: row for row in complete}
    return PromptData(train, evaluation, held_out, max(buckets), by_id, ptx_loader(run.cfg, actor))
