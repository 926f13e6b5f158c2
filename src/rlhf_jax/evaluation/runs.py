"""Everything that a run reached, measured on the very rows that it held out.

The rows come from the run's own config.yaml, by the code that trained: its split, its seed, its
lengths. Policies answer every held-out prompt at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_jax.cli.parse import resolve
from rlhf_jax.data.blend import QUICKSTART
from rlhf_jax.data.tokenize import PromptRow, tokenize_pairs, tokenize_prompts
from rlhf_jax.evaluation.config import Perplexity
from rlhf_jax.evaluation.course import course
from rlhf_jax.evaluation.lengths import Answers, at_equal_length, decompose, near_pairs
from rlhf_jax.evaluation.pairs import figures
from rlhf_jax.evaluation.perplexity import evaluate_perplexity
from rlhf_jax.evaluation.statistics import bootstrap
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.inference.answers import Generation
from rlhf_jax.inference.dtypes import LoadDtype
from rlhf_jax.inference.places import is_model
from rlhf_jax.inference.session import Model, load
from rlhf_jax.runtime.report.reading import RunRecord, read_run
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.reward_calls import call, weighted_sum
from rlhf_jax.stages.reward_functions import load_reward_functions
from rlhf_jax.stages.reward_plan import score_statistics, token_difference
from rlhf_jax.stages.rows import read_rows
from rlhf_jax.stages.run import CONFIG_FILE, flatten
from rlhf_jax.stages.scores import answered

type Policy = Literal["sft", "actor", "actor_ema"]
BEFORE: Policy = "sft"
AFTER: tuple[Policy, ...] = ("actor", "actor_ema")
NUM_SAMPLES = 8
CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        text: a file of running text for the perplexity; None: that is left out.
        max_rows: only the first held-out rows.
        flags: of training, over those of config.yaml: where models and data lie now.
    """

    text: str | None = None
    max_rows: int | None = None
    flags: tuple[str, ...] = ()
    batch_size: int = 64
    mesh: str | None = None
    dtype: LoadDtype = "float32"
    seed: int = 0


def measure_run(directory: Path, settings: Settings) -> dict[str, Any]:
    """The results of a run of steps 1 (2) 3, as JSON.

    Raises:
        ValueError, FileNotFoundError: it did not end, or its rows are no longer where they were.
    """
    record = read_run(directory)
    cfg = resolve([f"--config={directory / CONFIG_FILE}", *settings.flags])[0]
    for name in (BEFORE, AFTER[0]):
        if not is_model(directory / name):
            raise ValueError(f"{directory} has no {name}/: a run of steps 1 and 3 leaves it")
    scored = cfg.ppo.reward_model_weight > 0
    return {
        "name": record.name,
        "seed": cfg.seed,
        "measured": asdict(settings),
        "config": flatten(cfg),
        "sft": sft_perplexity(record),
        "reward": measure_pairs(directory, cfg, settings) if scored else None,
        "policies": measure_policies(directory, cfg, settings),
        "text": measure_text(directory, cfg, settings),
        "curve": curve(record),
        "course": course(record),
        "seconds": seconds(record),
    }


def sft_perplexity(record: RunRecord) -> dict[str, float] | None:
    """Of held-out answers, before and after step 1; None where the run has not logged it."""
    stage = record.stages.get("sft")
    losses = stage.series("eval/cross_entropy") if stage else []
    if len(losses) < 2:
        return None
    return {"before": float(np.exp(losses[0])), "after": float(np.exp(losses[-1]))}


def measure_pairs(directory: Path, cfg: TrainConfig, settings: Settings) -> dict[str, Any]:
    """`figures` of the reward model on all held-out pairs."""
    source = find_pretrained(str(directory / "reward"), scalar=True)
    read = read_rows(cfg, "reward", source, tokenize_pairs)
    rows = read.held_out[: settings.max_rows]
    if not rows:
        raise ValueError(f"{directory} held out no pairs: --data.eval-fraction holds out some")
    judge = opened(directory / "reward", settings)
    both = [row.chosen for row in rows] + [row.rejected for row in rows]
    scores = np.array(judge.score(both, batch_size=settings.batch_size))
    found = figures(rows, scores[: len(rows)], scores[len(rows) :], CALIBRATION_BINS, settings.seed)
    return {"rows": list(read.notes), **found}


def opened(path: Path, settings: Settings) -> Model:
    """A model of the run."""
    return load(path, mesh=settings.mesh, dtype=settings.dtype)


def measure_policies(directory: Path, cfg: TrainConfig, settings: Settings) -> dict[str, Any]:
    """Each policy's answers in figures, those after PPO compared with those before."""
    source = find_pretrained(str(directory / BEFORE))
    rows = read_rows(cfg, "ppo", source, tokenize_prompts).held_out[: settings.max_rows]
    if not rows:
        raise ValueError(f"{directory} held out no prompts: --data.eval-fraction holds out some")
    names = [name for name in (BEFORE, *AFTER) if is_model(directory / name)]
    said: dict[str, list[Generation]] = {}
    own: dict[str, np.ndarray] = {}
    for name in names:
        model = opened(directory / name, settings)
        said[name] = answer(model, rows, cfg, settings)
        own[name] = answer_logprobs(model, rows, said[name], settings)
    reference = opened(directory / BEFORE, settings)
    scores = Scorer.of(directory, cfg, settings).score(rows, said)
    before = Answers(scores[BEFORE], lengths_of(said[BEFORE]))
    results: dict[str, Any] = {BEFORE: about(said[BEFORE], scores[BEFORE])}
    for name in names[1:]:
        after = Answers(scores[name], lengths_of(said[name]))
        kl_N = own[name] - answer_logprobs(reference, rows, said[name], settings)
        results[name] = {
            **about(said[name], scores[name]),
            "kl": asdict(bootstrap(kl_N, seed=settings.seed)),
            **comparison(before, after, settings.seed),
        }
    return {
        "prompts": len(rows),
        **results,
        "samples": samples(rows[:NUM_SAMPLES], said, scores),
    }


def answer(
    model: Model, rows: Sequence[PromptRow], cfg: TrainConfig, settings: Settings
) -> list[Generation]:
    """Sampled as the evaluations of a run are: temperature 1, nothing cut off."""
    return model.generate(
        [row.tokens for row in rows],
        max_new_tokens=cfg.ppo.max_answer_seq_len,
        seed=settings.seed,
        batch_size=settings.batch_size,
    )


def answer_logprobs(
    model: Model, rows: Sequence[PromptRow], said: Sequence[Generation], settings: Settings
) -> np.ndarray:
    """The log-probability of each whole answer: `Σ_t log p(token_t)`, [N] float64."""
    whole = [[*row.tokens.tolist(), *each.tokens] for row, each in zip(rows, said, strict=True)]
    found = model.logprobs(whole, batch_size=settings.batch_size)
    return np.array(
        [
            logprobs[len(row.tokens) - 1 :].sum(dtype=np.float64)
            for row, logprobs in zip(rows, found, strict=True)
        ]
    )


@dataclass(frozen=True)
class Scorer:
    """What PPO maximised, less the KL and the penalty of answers without an end."""

    directory: Path
    cfg: TrainConfig
    settings: Settings
    mean: float
    std: float

    @classmethod
    def of(cls, directory: Path, cfg: TrainConfig, settings: Settings) -> "Scorer":
        """ValueError where the reward model reads other tokens than the policies write."""
        mean, std = 0.0, 1.0
        if cfg.ppo.reward_model_weight:
            reward = find_pretrained(str(directory / "reward"), scalar=True)
            difference = token_difference(find_pretrained(str(directory / BEFORE)), reward)
            if difference is not None:
                raise ValueError(f"{difference}: such a run cannot be measured here")
            mean, std = score_statistics(cfg.ppo, reward)
        return cls(directory, cfg, settings, mean, std)

    def score(
        self, rows: Sequence[PromptRow], said: dict[str, list[Generation]]
    ) -> dict[str, np.ndarray]:
        """Of every answer, by policy: the reward model's, in its standard units, and those of
        the reward functions.
        """
        ppo = self.cfg.ppo
        scores = {name: np.zeros(len(rows)) for name in said}
        if ppo.reward_model_weight:
            judge = opened(self.directory / "reward", self.settings)
            for name, answers in said.items():
                whole = [
                    [*row.tokens.tolist(), *each.tokens]
                    for row, each in zip(rows, answers, strict=True)
                ]
                raw = np.array(judge.score(whole, batch_size=self.settings.batch_size))
                scores[name] += ppo.reward_model_weight * (raw - self.mean) / self.std
        functions = load_reward_functions(ppo.reward_fn, ppo.reward_fn_weights)
        for name, answers in said.items() if functions else ():
            texts, ids = [each.text for each in answers], [each.tokens for each in answers]
            judged = np.stack([call(each, answered(rows, texts, ids)) for each in functions])
            scores[name] += weighted_sum(functions, judged)
        return scores


def lengths_of(said: Sequence[Generation]) -> np.ndarray:
    """Tokens of each answer, its end included."""
    return np.array([len(each.tokens) for each in said])


def about(said: Sequence[Generation], scores_N: np.ndarray) -> dict[str, float]:
    """Answers of one policy in figures."""
    return {
        "score_mean": float(scores_N.mean()),
        "score_std": float(scores_N.std()),
        "length_mean": float(lengths_of(said).mean()),
        "truncated": float(np.mean([not each.stopped for each in said])),
    }


def comparison(before: Answers, after: Answers, seed: int) -> dict[str, Any]:
    """The gain, also in deviations of the scores before, and how much of it is length."""
    gain_N, deviation = after.scores_N - before.scores_N, float(before.scores_N.std())
    gain = bootstrap(gain_N, seed=seed)
    parts = [f(before, after, seed=seed) for f in (decompose, at_equal_length, near_pairs)]
    stratified, linear, near = (None if part is None else asdict(part) for part in parts)
    return {
        "gain": asdict(gain),
        "gain_in_deviations": gain.value / deviation if deviation else None,
        "wins": float((gain_N > 0).mean()),
        "ties": float((gain_N == 0).mean()),
        "length": {"stratified": stratified, "linear": linear, "near_pairs": near},
    }


def samples(
    rows: Sequence[PromptRow],
    said: dict[str, list[Generation]],
    scores: dict[str, np.ndarray],
) -> list[dict[str, Any]]:
    """The first prompts with all answers and scores."""
    return [
        {"prompt": row.prompt}
        | {name: {"text": said[name][n].text, "score": float(scores[name][n])} for name in said}
        for n, row in enumerate(rows)
    ]


def measure_text(directory: Path, cfg: TrainConfig, settings: Settings) -> dict[str, float] | None:
    """Perplexity of running text under the base model and every policy."""
    if settings.text is None:
        return None
    models = {} if cfg.actor_model == QUICKSTART else {"base": cfg.actor_model}
    models |= {
        name: str(directory / name) for name in (BEFORE, *AFTER) if is_model(directory / name)
    }
    common = Perplexity(
        model="", data=settings.text, batch_size=8, mesh=settings.mesh, dtype=settings.dtype
    )
    return {
        name: evaluate_perplexity(replace(common, model=path))["perplexity"]
        for name, path in models.items()
    }


CURVE = (
    "objective/scores",
    "objective/kl",
    "objective/entropy",
    "response_length/mean",
    "response_length/clip_ratio",
    "policy/clipfrac_avg",
    "critic/vf_explained_var",
    "eval/objective/scores",
    "eval/objective/kl",
    "eval/ema_objective/scores",
)
CURVE_ROWS = 12


def curve(record: RunRecord) -> list[dict[str, float]]:
    """PPO's metrics in about `CURVE_ROWS` iterations, evenly, and in all that were evaluated."""
    stage = record.stages.get("ppo")
    if stage is None:
        return []
    chosen = set(np.linspace(0, len(stage.steps) - 1, CURVE_ROWS).round().astype(int).tolist())
    return [
        {"step": step}
        | {name: values[name] for name in CURVE if np.isfinite(values.get(name, np.nan))}
        for n, (step, values) in enumerate(zip(stage.steps, stage.values, strict=True))
        if n in chosen or "eval/objective/scores" in values
    ]


def seconds(record: RunRecord) -> dict[str, dict[str, float]]:
    """Wall clock by stage and phase; `all` is the whole stage."""
    found: dict[str, dict[str, float]] = {}
    for name, stage in record.stages.items():
        phases = [metric for metric in stage.metrics if metric.startswith("timing_s/")]
        found[name] = {
            phase.removeprefix("timing_s/"): float(sum(stage.series(phase)))
            for phase in phases
            if phase != "timing_s/step"
        } | {"all": stage.seconds}
    return found
