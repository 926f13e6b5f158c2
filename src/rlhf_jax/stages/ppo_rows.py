"""Which rows the programs of an iteration see, and in which sequences where rows are packed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from meshes.layout import Layout
from meshes.multihost import to_host
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.data.placing import Groups, alone, balance, place
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.models.packed_rows import Places
from rlhf_jax.objectives.experience import Experience
from rlhf_jax.stages.ppo_config import PPOConfig


@dataclass(frozen=True)
class RowSizes:
    """Tokens of prompt and answer of every row, 0 where it is a filler, and how wide the rows are
    where they are not packed.
    """

    lengths_B: np.ndarray
    width: int


type Saved = dict[str, Any]
"""A metric where rows are packed, nothing where they are not."""


class Scored(NamedTuple):
    """A batch that was generated and scored; `sizes` where rows are packed."""

    experience: Experience
    valid_B: np.ndarray
    sizes: RowSizes | None = None


def minibatches(
    cfg: PPOConfig, batches: Sequence[Scored], seed: int, step: int
) -> Iterator[tuple[Scored, np.ndarray]]:
    """Which rows of which batch each optimizer step sees, epoch by epoch.

    A minibatch never mixes two generated batches, as in DeepSpeed-Chat; their order and the order
    of their rows are drawn anew in every epoch. Filler rows come behind the valid ones of their
    batch, and a minibatch without a valid row is left out.
    """
    for epoch in range(cfg.ppo_epochs):
        rng = np.random.default_rng((seed, step, epoch))
        chunks = [
            (batch, rows)
            for batch in batches
            for rows in valid_first(rng.permutation(cfg.batch_size), batch.valid_B).reshape(
                -1, cfg.rows_per_step
            )
            if batch.valid_B[rows].any()
        ]
        for n in rng.permutation(len(chunks)):
            yield chunks[n]


def valid_first(rows: np.ndarray, valid_B: np.ndarray) -> np.ndarray:
    """The rows in their order, but filler rows behind all others."""
    return rows[np.argsort(valid_B[rows] == 0, kind="stable")]


def count_updates(cfg: PPOConfig, sizes: Iterable[int]) -> int:
    """How many optimizer steps batches of so many valid rows make: what a schedule runs over."""
    return cfg.ppo_epochs * sum(-(-size // cfg.rows_per_step) for size in sizes)


@dataclass(frozen=True)
class RowPacking:
    """How the batches of a run are packed: not at all unless `enabled`.

    Sequences have the sizes that rows of `widest` tokens have, whatever bucket prompts are in, so
    that few programs are compiled.
    """

    enabled: bool
    num_shards: int
    num_parts: int
    widest: int

    @classmethod
    def create(cls, cfg: PPOConfig, layout: Layout, max_prompt: int) -> "RowPacking":
        """Of a run whose longest bucket of prompts is `max_prompt`."""
        widest = max_prompt + cfg.max_answer_seq_len
        shards, parts = layout.batch_size_divisor, cfg.gradient_accumulation_steps
        return cls(cfg.packing, shards, parts, widest)

    def sizes(self, prompts: PromptBatch, rollout: Rollout) -> RowSizes | None:
        """Waits for a rollout: the lengths of its answers come to the host."""
        if not self.enabled:
            return None
        lengths_B = prompts.lengths_B + to_host(rollout.lengths_B)
        width = prompts.tokens_BP.shape[1] + rollout.tokens_BR.shape[1]
        return RowSizes(np.where(prompts.valid_B > 0, lengths_B, 0), width)

    def score(
        self, prompts: PromptBatch, sizes: RowSizes | None
    ) -> tuple[PromptBatch, Places | None, Saved]:
        """A batch to score, its places, and what they save. Where it is packed, its rows are as
        wide as those of any other batch, and go through the models on the devices that `balance`
        gives them to.
        """
        if sizes is None:
            return prompts, None, {}
        groups = Groups(self.num_shards)
        order = balance(sizes.lengths_B, groups)
        places = place(sizes.lengths_B[order], groups, width=self.widest, unpacked=sizes.width)
        if places is not None:
            places = places.of_rows(order)
            more = ((0, 0), (0, self.widest - sizes.width))
            prompts = replace(prompts, tokens_BP=np.pad(prompts.tokens_BP, more))
        tokens = tokens_of(places, groups, len(sizes.lengths_B) * sizes.width)
        return prompts, places, saved("score", tokens, len(sizes.lengths_B) * sizes.width)

    def minibatch(self, rows: np.ndarray, batch: Scored) -> tuple[np.ndarray, Places | None, Saved]:
        """The rows of an optimizer step, their places, and what they save. Where they are packed,
        their order gives all devices and parts about as many tokens. Sequences are eighths of the
        widest rows; where rows as wide as their own bucket have fewer tokens, each stands alone.
        """
        sizes = batch.sizes
        if sizes is None:
            return rows, None, {}
        groups = Groups(self.num_shards, self.num_parts)
        order = rows[balance(sizes.lengths_B[rows], groups)]
        width = batch.experience.tokens_BT.shape[1]
        places = place(sizes.lengths_B[order], groups, width=self.widest, unpacked=width)
        tokens, unpacked = tokens_of(places, groups, len(rows) * width), len(rows) * sizes.width
        if tokens > unpacked:
            places, tokens = alone(sizes.lengths_B[order], groups, sizes.width), unpacked
        return rows if places is None else order, places, saved("update", tokens, unpacked)


def tokens_of(places: Places | None, groups: Groups, unpacked: int) -> int:
    """How many go through a model, over all devices and parts."""
    return unpacked if places is None else places.num_tokens * groups.count


def saved(program: str, tokens: int, unpacked: int) -> Saved:
    """The metric of a program: the share of the tokens of rows that it leaves out."""
    return {f"perf/{program}_tokens_saved": np.float32(1 - tokens / unpacked)}
