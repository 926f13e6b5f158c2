"""Answers as people read them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.data.encoder import text_behind
from rlhf_jax.engine.generate import Rollout


@dataclass(frozen=True)
class Generation:
    """One answer: what the model put behind the prompt.

    Attributes:
        text: without special tokens and without the stop token.
        tokens: ids, the stop token included where one was produced.
        logprobs: log-probability of each token at the sampling temperature (1 for greedy), over
            the whole vocabulary: before repetition penalty, top-k, top-p and min-p.
        stopped: whether a stop token ended it, rather than `max_new_tokens`.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    stopped: bool


def read_answers(
    batch: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Generation]:
    """The answers to the real rows of a batch; `rollout` holds NumPy arrays."""
    for row in range(int(batch.valid_B.sum())):
        length, stopped = int(rollout.lengths_B[row]), bool(rollout.ended_B[row])
        tokens = np.asarray(rollout.tokens_BR)[row, :length].tolist()
        prompt = batch.tokens_BP[row, : batch.lengths_B[row]].tolist()
        yield Generation(
            text=text_behind(prompt, tokens[: length - stopped], tokenizer),
            tokens=tokens,
            logprobs=np.asarray(rollout.logprobs_BR)[row, :length].tolist(),
            stopped=stopped,
        )
