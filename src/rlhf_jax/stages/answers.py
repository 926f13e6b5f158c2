"""What a policy says to held-out prompts; in the quickstart the truth about it too."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from meshes.multihost import to_host
from rlhf_jax.data import world
from rlhf_jax.data.batches import PromptBatch, collate_prompts, round_up
from rlhf_jax.data.blend import QUICKSTART
from rlhf_jax.data.tokenize import PairRow, PromptRow
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.params import Params
from rlhf_jax.runtime.metrics import Sample, SampleTable
from rlhf_jax.stages.run import Run

NUM_SAMPLES = 32
PAD_MULTIPLE = 8

type Shares = dict[str, dict[str, float]]
"""By task, and over `all`: the shares of right, wrong and unhelpful answers."""


class HeldOutAnswers:
    """Answers the prompts of held-out pairs, sampled at temperature 1 and greedily.

    An answer may be as long as the longest one in these pairs.
    """

    def __init__(self, run: Run, model: Pretrained, pairs: Sequence[PairRow], batch_size: int):
        self.run, self.tokenizer = run, model.tokenizer
        self.engine = HybridEngine(model.cfg, run.mesh, model.cfg.stop_ids)
        self.prompts, self.max_answer = prompts_of(pairs, model)
        room = model.cfg.max_positions - self.max_answer
        self.batches = batches_of(self.prompts, batch_size, room)
        self.table = SampleTable(run.directory / "samples" / "dpo.jsonl")
        self.first: list[str] = []

    def measure(self, step: int, params: Params[jax.Array]) -> dict[str, Any]:
        """A table of samples; in the quickstart also `{"judged": shares by way of sampling}`."""
        if not self.prompts:
            return {}
        answers = self.answer(params, SamplingConfig(max_new_tokens=self.max_answer))
        self.first = self.first or answers
        rows = zip(self.prompts, answers, self.first, strict=True)
        samples = [Sample(row.prompt, now, answer_before=before) for row, now, before in rows]
        self.table.write(step, samples[:NUM_SAMPLES])
        if self.run.cfg.data.data_path != (QUICKSTART,):
            return {}
        greedy = self.answer(params, SamplingConfig(self.max_answer, temperature=0.0))
        prompts = [row.prompt for row in self.prompts]
        return {"judged": {"sampled": shares(prompts, answers), "greedy": shares(prompts, greedy)}}

    def answer(self, params: Params[jax.Array], sampling: SamplingConfig) -> list[str]:
        """One answer to every prompt."""
        answers: list[str] = []
        for batch in self.batches:
            key = self.run.key(0, "evaluate")
            rollout = to_host(self.engine.generate(params, batch, sampling, key=key))
            texts = decode(self.tokenizer, rollout.tokens_BR, rollout.lengths_B)
            answers += texts[: int(batch.valid_B.sum())]
        return answers


def prompts_of(pairs: Sequence[PairRow], model: Pretrained) -> tuple[list[PromptRow], int]:
    """The prompts of pairs (the empty ones left out), and the room that an answer needs."""
    rows: list[PromptRow] = []
    longest = 1
    for pair in pairs:
        if pair.prompt_length == 0:
            continue
        tokens = pair.chosen[: pair.prompt_length]
        text = str(model.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
        rows.append(PromptRow(tokens, len(rows), text))
        longest = max(longest, *(len(row) - len(tokens) for row in (pair.chosen, pair.rejected)))
    room = model.cfg.max_positions - max((len(row.tokens) for row in rows), default=0)
    return rows, min(longest, room)


def batches_of(rows: list[PromptRow], batch_size: int, room: int) -> list[PromptBatch]:
    """The prompts in order, all padded to one length, `room` at most."""
    if not rows:
        return []
    length = min(round_up(max(len(row.tokens) for row in rows), PAD_MULTIPLE), room)
    starts = range(0, len(rows), batch_size)
    return [
        collate_prompts(rows[n : n + batch_size], batch_size, buckets=(length,)) for n in starts
    ]


def decode(
    tokenizer: PreTrainedTokenizerBase, tokens_BR: np.ndarray, lengths_B: np.ndarray
) -> list[str]:
    """The text of answers."""
    rows = [row[:n].tolist() for row, n in zip(tokens_BR, lengths_B, strict=True)]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def shares(prompts: Sequence[str], answers: Sequence[str]) -> Shares:
    """What the quickstart's judge says of answers to its prompts."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = world.judge(prompt, answer)
        for task in (world.task_of(prompt), "all"):
            counts[task][verdict] += 1
    return {
        task: {v: count[v] / count.total() for v in ("right", "wrong", "unhelpful")}
        for task, count in counts.items()
    }
