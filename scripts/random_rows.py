"""Random prompts and answers for benchmarks and checks of a PPO iteration."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch, collate_prompts
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.stages.prompts import PromptData
from scripts.iteration_flops import Setting

SHORTEST = 4
"""Uniform prompts have from a quarter of the longest on."""
MEDIAN, SIGMA = 80 / 256, 0.8
"""Of log-normal answers, as a share of the longest, which cuts them off; and of their logarithm."""


def random_prompts(setting: Setting, *, varied: bool) -> PromptData:
    """Prompts of full length, four batches of them, whose answers end at the limit; or one batch of
    prompts that are uniformly long and answers that are log-normally so.
    """
    cfg, rng = setting.ppo, np.random.default_rng(0)
    longest, count = cfg.max_prompt_seq_len, cfg.batch_size * (1 if varied else 4)
    lengths, limits = np.full(count, longest), None
    if varied:
        lengths = rng.integers(longest // SHORTEST, longest + 1, count)
        drawn = cfg.max_answer_seq_len * MEDIAN * rng.lognormal(0, SIGMA, count)
        limits = np.clip(np.round(drawn), 1, cfg.max_answer_seq_len).astype(np.int32)
    rows = [
        PromptRow(rng.integers(5, setting.actor.vocab_size, n).astype(np.int32), number, "")
        for number, n in enumerate(lengths)
    ]

    def collate(some: Sequence[PromptRow], size: int) -> PromptBatch:
        batch = collate_prompts(some, size, buckets=(longest,))
        return batch if limits is None else replace(batch, limits_B=limits[batch.sample_ids_B])

    train = Loader(rows, collate, batch_size=cfg.batch_size, seed=0)
    return PromptData(train, [], [], longest, dict(enumerate(rows)))


def random_answers(setting: Setting) -> Rollout:
    """Random tokens in every place, with the log-probabilities of a model that knows nothing."""
    cfg, rng = setting.ppo, np.random.default_rng(1)
    shape = cfg.batch_size, cfg.max_answer_seq_len
    vocabulary = setting.actor.vocab_size
    made: dict[str, Any] = {
        "tokens_BR": rng.integers(5, vocabulary, shape).astype(np.int32),
        "logprobs_BR": np.full(shape, -np.log(vocabulary), np.float32),
        "lengths_B": np.full(shape[0], shape[1], np.int32),
        "ended_B": np.zeros(shape[0], bool),
    }
    return Rollout(**made)


class Replayed(HybridEngine):
    """Decodes nothing: returns `answers` (NumPy), where this mesh has a rollout's."""

    def __init__(self, engine: HybridEngine, answers: Rollout) -> None:
        super().__init__(engine.cfg, engine.mesh, engine.stop_ids)
        self.answers = answers

    def generate(self, *args: Any, **kwargs: Any) -> Rollout:
        """The answers."""
        del args, kwargs
        return put_batch(self.answers, self.rollout)
