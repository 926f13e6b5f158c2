"""Held-out evaluation of the policy: rewards, lengths, samples; in the quickstart the truth too."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from meshes.multihost import to_host
from meshes.reshard import put_batch
from rlhf_jax.data import world
from rlhf_jax.data.blend import QUICKSTART
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.ppo_step import Scorers
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.runtime.metrics import Sample, SampleTable
from rlhf_jax.stages.prompts import PromptData
from rlhf_jax.stages.roles import Roles
from rlhf_jax.stages.run import Run

NUM_SAMPLES = 32
EVALUATED = (
    "objective/scores",
    "objective/kl",
    "response_length/mean",
    "response_length/clip_ratio",
)


class Evaluator:
    """Answers the held-out prompts, sampled at temperature 1 and greedily, and remembers how the
    first and the last policy it saw did.
    """

    def __init__(
        self, run: Run, engine: HybridEngine, score: Any, data: PromptData, actor: Pretrained
    ) -> None:
        self.run, self.engine, self.score, self.data = run, engine, score, data
        self.tokenizer = actor.tokenizer
        self.table = SampleTable(run.directory / "samples" / "ppo.jsonl")
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.first_answers: list[tuple[str, float]] = []

    def measure(self, step: int, roles: Roles) -> dict[str, float]:
        """`eval/*` of this policy, and a table of samples; nothing where no prompt is held out."""
        if not self.data.evaluation:
            return {}
        length = self.run.cfg.ppo.max_answer_seq_len
        answers, metrics = self.answer(roles, SamplingConfig(max_new_tokens=length))
        results: dict[str, Any] = {f"eval/{name}": value for name, value in metrics.items()}
        if self.judged:
            greedy, _ = self.answer(roles, SamplingConfig(max_new_tokens=length, temperature=0.0))
            results["judged"] = {"sampled": self.judge(answers), "greedy": self.judge(greedy)}
            for how, shares in results["judged"].items():
                for verdict, share in shares["all"].items():
                    results[f"eval/{how}_{verdict}"] = share
        self.write_samples(step, answers)
        self.first = self.first or results
        self.last = results
        return {name: value for name, value in results.items() if name != "judged"}

    def answer(
        self, roles: Roles, sampling: SamplingConfig
    ) -> tuple[list[tuple[str, float]], dict[str, float]]:
        """(answer, score) of every held-out prompt, and the means of what scoring measures."""
        scorers = Scorers(roles.actor.params, roles.reference, roles.critic.params, roles.reward)
        answers: list[tuple[str, float]] = []
        sums: dict[str, float] = defaultdict(float)
        for batch in self.data.evaluation:
            key = self.run.key(0, "evaluate")
            rollout = self.engine.generate(roles.actor.params, batch, sampling, key=key)
            experience, metrics = self.score(
                scorers, put_batch(batch, self.engine.compute), rollout
            )
            host, scores, metrics = to_host((rollout, experience.scores_B, metrics))
            real = int(batch.valid_B.sum())
            texts = self.decode(host.tokens_BR, host.lengths_B)
            answers += list(zip(texts, scores.tolist(), strict=True))[:real]
            for name in EVALUATED:
                sums[name] += float(metrics[name]) * real
        return answers, {name: total / len(answers) for name, total in sums.items()}

    def decode(self, tokens_BR: np.ndarray, lengths_B: np.ndarray) -> list[str]:
        """The text of answers."""
        rows = [row[:n].tolist() for row, n in zip(tokens_BR, lengths_B, strict=True)]
        return [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]

    @property
    def judged(self) -> bool:
        """Whether the prompts are the quickstart's, whose right answers are known."""
        return self.run.cfg.data.data_path == (QUICKSTART,)

    def judge(self, answers: list[tuple[str, float]]) -> dict[str, dict[str, float]]:
        """Shares of right, wrong and unhelpful answers, by task and over all."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for row, (answer, _) in zip(self.data.held_out, answers, strict=True):
            verdict = world.judge(row.prompt, answer)
            for task in (world.task_of(row.prompt), "all"):
                counts[task][verdict] += 1
        return {
            task: {v: count[v] / count.total() for v in ("right", "wrong", "unhelpful")}
            for task, count in counts.items()
        }

    def write_samples(self, step: int, answers: list[tuple[str, float]]) -> None:
        """The first prompts with what the first policy and this one said."""
        first = self.first_answers or answers
        self.first_answers = first
        rows = zip(self.data.held_out, answers, first, strict=True)
        self.table.write(
            step,
            [
                Sample(row.prompt, now[0], now[1], before[0], before[1])
                for row, now, before in list(rows)[:NUM_SAMPLES]
            ],
        )

    def comparison(self) -> dict[str, Any]:
        """What the policy did before and after training."""
        return {"before": self.first, "after": self.last}
