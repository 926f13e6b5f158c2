"""Held-out evaluation of the policy: rewards, lengths, samples; in the quickstart the truth too."""

from collections import defaultdict
from typing import Any

import jax

from meshes.multihost import to_host
from meshes.reshard import put_batch, put_rows
from rlhf_jax.data.blend import QUICKSTART
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.ppo_step import Scorers
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.params import Params
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.runtime.metrics import Sample, SampleTable
from rlhf_jax.stages.answers import Shares, decode, shares
from rlhf_jax.stages.prompts import PromptData
from rlhf_jax.stages.roles import Roles
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.scores import HostScorer

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
        self,
        run: Run,
        engine: HybridEngine,
        score: Any,
        host: HostScorer,
        data: PromptData,
        actor: Pretrained,
    ) -> None:
        self.run, self.engine, self.score, self.host, self.data = run, engine, score, host, data
        self.rows = {row.sample_id: row for row in data.held_out}
        self.tokenizer = actor.tokenizer
        self.table = SampleTable(run.directory / "samples" / "ppo.jsonl")
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.first_answers: list[tuple[str, float]] = []

    def measure(self, step: int, roles: Roles, average: Any = None) -> dict[str, float]:
        """`eval/*` of this policy, `eval/ema_*` of its `average` if there is one, and a table of
        samples; nothing where no prompt is held out.
        """
        if not self.data.evaluation:
            return {}
        results, answers = self.judged_answers(roles, roles.policy)
        if average is not None:
            averaged, _ = self.judged_answers(roles, roles.whole_actor(average))
            results |= {
                name.replace("eval/", "eval/ema_") if "/" in name else f"ema_{name}": value
                for name, value in averaged.items()
            }
        self.write_samples(step, answers)
        self.first = self.first or results
        self.last = results
        return {name: value for name, value in results.items() if name.startswith("eval/")}

    def judged_answers(
        self, roles: Roles, policy: Params[jax.Array]
    ) -> tuple[dict[str, Any], list[tuple[str, float]]]:
        """`eval/*` of a policy, with the shares by task where the truth is known (`judged`), and
        its sampled answers.
        """
        length = self.run.cfg.ppo.max_answer_seq_len
        answers, metrics = self.answer(roles, policy, SamplingConfig(max_new_tokens=length))
        results: dict[str, Any] = {f"eval/{name}": value for name, value in metrics.items()}
        if self.judged:
            plain = SamplingConfig(max_new_tokens=length, temperature=0.0)
            greedy, _ = self.answer(roles, policy, plain)
            results["judged"] = {"sampled": self.judge(answers), "greedy": self.judge(greedy)}
            for how, shares in results["judged"].items():
                for verdict, share in shares["all"].items():
                    results[f"eval/{how}_{verdict}"] = share
        return results, answers

    def answer(
        self, roles: Roles, policy: Params[jax.Array], sampling: SamplingConfig
    ) -> tuple[list[tuple[str, float]], dict[str, float]]:
        """(answer, score) of every held-out prompt, and the means of what scoring measures."""
        scorers = Scorers(policy, roles.reference, roles.value_model, roles.reward)
        all_scores = []
        answers: list[tuple[str, float]] = []
        sums: dict[str, float] = defaultdict(float)
        for batch in self.data.evaluation:
            key = self.run.key(0, "evaluate")
            rollout = self.engine.generate(policy, batch, sampling, key=key)
            outside = self.host.score(batch, self.rows, rollout, roles.text_reward)
            all_scores.append(outside)
            # Nothing adapts here, so that scores of all evaluations compare.
            experience, _, metrics = self.score(
                scorers, put_batch(batch, self.engine.compute), rollout,
                outside and put_rows(outside.total_B, self.engine.compute, "batch"), Control(),
            )  # fmt: skip
            host, scores, metrics = to_host((rollout, experience.scores_B, metrics))
            real = int(batch.valid_B.sum())
            texts = decode(self.tokenizer, host.tokens_BR, host.lengths_B)
            answers += list(zip(texts, scores.tolist(), strict=True))[:real]
            for name in EVALUATED:
                sums[name] += float(metrics[name]) * real
        measured = {name: total / len(answers) for name, total in sums.items()}
        return answers, measured | self.host.metrics(all_scores)

    @property
    def judged(self) -> bool:
        """Whether the prompts are the quickstart's, whose right answers are known."""
        return self.run.cfg.data.data_path == (QUICKSTART,)

    def judge(self, answers: list[tuple[str, float]]) -> Shares:
        """Shares of right, wrong and unhelpful answers, by task and over all."""
        return shares([row.prompt for row in self.data.held_out], [text for text, _ in answers])

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
        held_out = {"held_out_rows": len(self.data.held_out)} if self.first else {}
        return {"before": self.first, "after": self.last} | held_out
