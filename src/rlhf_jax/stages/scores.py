"""Scores that are made on the host: by reward functions, and by a reward model that reads text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from meshes.multihost import from_first_process, to_host
from rlhf_jax.data.batches import COPIES_APART, PromptBatch
from rlhf_jax.data.encoder import text_behind
from rlhf_jax.data.records import Message
from rlhf_jax.data.render import ChatFormat
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.models.params import ScalarModel
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.retokenized import TextScorer, TextWriter
from rlhf_jax.stages.reward_calls import Answered, call, weighted_sum
from rlhf_jax.stages.reward_functions import RewardFunction
from rlhf_jax.stages.reward_plan import RewardPlan, score_statistics

TEXT_MODEL = "reward_model"
"""What metrics call a reward model that reads text."""


@dataclass(frozen=True)
class TextReward:
    """A reward model with a tokenizer of its own; its scores are standardised and weighted."""

    scorer: TextScorer
    mean: float
    std: float
    weight: float


@dataclass(frozen=True)
class HostScores:
    """Scores of one batch.

    Attributes:
        total_B: float32, what is added to the score of every row; 0 in filler rows.
        parts: float32 scores of the valid rows by name, unweighted; NaN: not judged.
        num_cut: rows that a reward model of text could not read whole.
    """

    total_B: np.ndarray
    parts: Mapping[str, np.ndarray]
    num_cut: int = 0


class HostScorer:
    """What scores answers outside of the compiled programs of an iteration.

    Reward functions run on the first process alone: the others get their scores.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        functions: Sequence[RewardFunction],
        text: TextReward | None,
        *,
        alone: bool,
    ) -> None:
        """`tokenizer` is the actor's; `alone` where no reward model adds to the functions."""
        self.tokenizer = tokenizer
        self.functions = functions
        self.text = text
        self.alone = alone

    def score(
        self,
        prompts: PromptBatch,
        rows: Mapping[int, PromptRow],
        rollout: Rollout,
        reward: ScalarModel[jax.Array] | None,
    ) -> HostScores | None:
        """Scores of a rollout, whose prompts are `rows` by sample id; None where nothing here
        scores. `reward` are the parameters that read text.

        Raises:
            ValueError: a function failed, or no function judges a row and nothing else scores it.
        """
        if not self.functions and self.text is None:
            return None
        tokens_BR, lengths_B, ended_B = to_host(
            (rollout.tokens_BR, rollout.lengths_B, rollout.ended_B)
        )
        size, valid = len(lengths_B), int(prompts.valid_B.sum())
        asked = [rows[int(index) % COPIES_APART] for index in prompts.sample_ids_B[:valid]]
        ids = [tokens_BR[n, : lengths_B[n]].tolist() for n in range(valid)]
        asks = [prompts.tokens_BP[n, : prompts.lengths_B[n]].tolist() for n in range(valid)]
        texts = [text_behind(*pair, self.tokenizer) for pair in zip(asks, ids, strict=True)]
        total_B, num_cut = np.zeros(size, np.float32), 0
        parts: dict[str, np.ndarray] = {}
        if self.functions:
            scores_NB = self.call_functions(answered(asked, texts, ids))
            parts |= zip([f.name for f in self.functions], scores_NB, strict=True)
            total_B[:valid] += weighted_sum(self.functions, scores_NB)
        if self.text is not None:
            assert reward is not None, "the model that reads text was loaded"
            encoded = self.text.scorer.write(asked, texts, ended_B[:valid].tolist())
            raw = self.text.scorer.score(reward, encoded.tokens, size)
            parts[TEXT_MODEL] = (raw - self.text.mean) / self.text.std
            total_B[:valid] += self.text.weight * parts[TEXT_MODEL]
            num_cut = encoded.num_cut
        return HostScores(total_B, parts, num_cut)

    def call_functions(self, rows: Answered) -> np.ndarray:
        """The functions' scores, `[N, B]`, the same on every process."""

        def make() -> np.ndarray:
            scores_NB = np.stack([call(reward, rows) for reward in self.functions])
            unjudged = np.flatnonzero(np.isnan(scores_NB).all(0))
            if self.alone and len(unjudged):
                raise ValueError(
                    f"every reward function returned None for the prompt "
                    f"{str(rows.prompts[unjudged[0]])[:60]!r}, and no reward model scores it: let "
                    "one of them return a number"
                )
            return scores_NB

        return from_first_process(make, (len(self.functions), len(rows.completions)))

    def metrics(self, scored: Sequence[HostScores | None]) -> dict[str, float]:
        """`rewards/<name>/mean` and `/std` over the rows of several batches that are judged; a
        name that judges none of them is left out.
        """
        batches = [scores for scores in scored if scores is not None]
        found: dict[str, float] = {}
        for name in batches[0].parts if batches else ():
            scores = np.concatenate([batch.parts[name] for batch in batches])
            judged = scores[~np.isnan(scores)]
            if len(judged):
                found[f"rewards/{name}/mean"] = float(judged.mean())
                found[f"rewards/{name}/std"] = float(judged.std())
        if batches and self.text is not None:
            found[f"rewards/{TEXT_MODEL}/num_cut"] = float(sum(b.num_cut for b in batches))
        return found


def host_scorer(
    cfg: PPOConfig,
    plan: RewardPlan,
    place: ModelOnMesh | None,
    tokenizer: PreTrainedTokenizerBase,
    chat_format: ChatFormat,
) -> HostScorer:
    """The scorer of a plan; the reward model computes at `place`, `tokenizer` is the actor's."""
    text = None
    if plan.by_text:
        assert plan.reward is not None
        assert place is not None
        writer = TextWriter.of(plan.reward, chat_format, score_eos=cfg.train_eos)
        scorer = TextScorer(writer, place)
        mean, std = score_statistics(cfg, plan.reward)
        text = TextReward(scorer, mean, std, cfg.reward_model_weight)
    return HostScorer(tokenizer, plan.functions, text, alone=plan.reward is None)


def answered(
    rows: Sequence[PromptRow], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Answered:
    """Answers beside the columns of their prompts' rows; messages where a prompt is messages."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns: dict[str, list[Any]] = {
        name: [row.columns.get(name) for row in rows] for name in names
    }
    prompts = [row.prompt if row.messages is None else as_dicts(row.messages) for row in rows]
    said = [
        text if row.messages is None else as_dicts([row.said(text)])
        for row, text in zip(rows, texts, strict=True)
    ]
    return Answered(prompts, said, ids, columns)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as TRL hands them to its functions."""
    return [message._asdict() for message in messages]
