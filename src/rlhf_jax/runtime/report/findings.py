"""What a person should act on, computed from the rows of a run. Each rule is stated with it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from rlhf_jax.runtime.report.reading import RunRecord, Stage

MIN_ROWS = 5
"""Fewer values of a metric say nothing about its course."""


@dataclass(frozen=True)
class Finding:
    """One warning.

    Attributes:
        title: what is the matter, in a line.
        stage: where.
        seen: the figures.
        means, advice: what they mean, and what to try.
        rule: when this warning appears.
    """

    title: str
    stage: str
    seen: str
    means: str
    advice: str
    rule: str


type Rule = Callable[[RunRecord, Stage], Finding | None]


def fifth(values: Sequence[float], where: float) -> list[float]:
    """A fifth of the values (one at least): the first at `where` 0, the middle 0.5, the last 1."""
    size = max(1, round(len(values) / 5))
    start = round((len(values) - size) * where)
    return list(values[start : start + size])


def ends(stage: Stage, name: str, least: int = MIN_ROWS) -> tuple[float, float] | None:
    """The means of the first and of the last fifth of a metric; None with fewer than `least`."""
    values = stage.series(name)
    if len(values) < least:
        return None
    return fmean(fifth(values, 0)), fmean(fifth(values, 1))


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where either is constant or there are fewer than three."""
    if len(x) < 3:
        return None
    mean_x, mean_y = fmean(x), fmean(y)
    dx, dy = [v - mean_x for v in x], [v - mean_y for v in y]
    scale = math.sqrt(sum(v * v for v in dx) * sum(v * v for v in dy))
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / scale if scale > 0 else None


def _kl_runs_away(run: RunRecord, stage: Stage) -> Finding | None:
    scores, kl = ends(stage, "objective/scores"), stage.series("objective/kl")
    if scores is None or len(kl) < MIN_ROWS or scores[1] <= scores[0]:
        return None
    middle, last = fmean(fifth(kl, 0.5)), fmean(fifth(kl, 1))
    if not (last > 40 or (last > 10 and last > 1.5 * middle)):
        return None
    return Finding(
        "The reward rises while KL runs away",
        stage.name,
        f"scores {scores[0]:.3g} → {scores[1]:.3g}; KL to the reference {middle:.1f} nats an "
        f"answer half-way, {last:.1f} at the end",
        "The policy may be leaving what the reward model has ever judged: scores rise there "
        "whether or not the answers get better. Read the samples.",
        "Raise --ppo.kl-coef (or set --ppo.adaptive-kl-target), lower --ppo.actor-learning-rate, "
        "or stop earlier.",
        "Scores of the last fifth above those of the first, and KL of the last fifth above 40 "
        "nats, or above 10 nats and 1.5 times the middle fifth.",
    )


def _kl_negative(run: RunRecord, stage: Stage) -> Finding | None:
    kl = ends(stage, "objective/kl")
    if kl is None or kl[1] >= -1:
        return None
    return Finding(
        "KL to the reference is negative",
        stage.name,
        f"objective/kl of the last fifth {kl[1]:.2f} nats an answer",
        "A KL divergence is never negative: answers are drawn from another distribution than "
        "the one that is scored. The policy can raise its reward by it.",
        "Sample without top-k, top-p, min-p and repetition penalty, at the temperature that "
        "scoring uses; check rollout/logprob_diff_mean.",
        "Mean objective/kl of the last fifth below -1.",
    )


def _only_longer(run: RunRecord, stage: Stage) -> Finding | None:
    lengths, scores = ends(stage, "response_length/mean"), ends(stage, "objective/scores")
    if lengths is None or scores is None or scores[1] <= scores[0]:
        return None
    among, kind = length_correlation(run, stage)
    if among is None or lengths[1] < 1.2 * lengths[0] or among < 0.5:
        return None
    return Finding(
        "Answers grow longer, and the reward with them",
        stage.name,
        f"length {lengths[0]:.1f} → {lengths[1]:.1f} tokens, scores {scores[0]:.3g} → "
        f"{scores[1]:.3g}; correlation of length and score {kind}: {among:.2f}",
        "Length alone may be what the reward model pays for.",
        "Compare answers of equal length in the samples. Lower --ppo.max-answer-seq-len, raise "
        "--ppo.kl-coef, or train the reward model on pairs in which the longer answer loses too.",
        "Length of the last fifth at least 1.2 times the first, scores higher, and the gains in "
        "length and in score of the last samples (8 or more; else the rows' lengths and scores) "
        "correlate by 0.5 or more.",
    )


def length_correlation(run: RunRecord, stage: Stage) -> tuple[float | None, str]:
    """How length goes with score: over the last evaluation's samples, else over rows."""
    rows = run.samples.get(stage.name, [])
    gains = [
        (len(row["answer"]) - len(row["answer_before"]), row["score"] - row["score_before"])
        for row in rows
        if row["step"] == rows[-1]["step"]
        and row.get("answer_before") is not None
        and row.get("score") is not None
        and row.get("score_before") is not None
    ]
    if len(gains) >= 8:
        found = correlation(*zip(*gains, strict=True))
        return found, f"gains over {len(gains)} samples"
    both = [
        (row["response_length/mean"], row["objective/scores"])
        for row in stage.values
        if {"response_length/mean", "objective/scores"} <= row.keys()
    ]
    both = [pair for pair in both if all(map(math.isfinite, pair))]
    return (correlation(*zip(*both, strict=True)) if both else None), f"over {len(both)} rows"


def _truncated(run: RunRecord, stage: Stage) -> Finding | None:
    shares = ends(stage, "response_length/clip_ratio", least=1)
    if shares is None or shares[1] < 0.5:
        return None
    what = "All" if shares[1] > 0.95 else "Most"
    limit = run.config.get("ppo", {}).get("max_answer_seq_len")
    return Finding(
        f"{what} answers are cut off",
        stage.name,
        f"{shares[1]:.0%} of the answers have no stop token"
        + (f" within {limit} tokens" if limit else ""),
        "The reward model judges beginnings of answers, and the policy does not learn to stop.",
        "Raise --ppo.max-answer-seq-len, check that step 1 has trained on text that ends with the "
        "stop token (response_length/clip_ratio of the first row), raise "
        "--ppo.missing-eos-penalty.",
        "response_length/clip_ratio of the last fifth at least 0.5.",
    )


def _scores_clipped(run: RunRecord, stage: Stage) -> Finding | None:
    shares = ends(stage, "objective/scores_clipped", least=1)
    if shares is None or shares[1] < 0.3:
        return None
    limit = run.config.get("ppo", {}).get("score_clip")
    return Finding(
        "Many scores are cut off",
        stage.name,
        f"{shares[1]:.0%} of the scores are beyond "
        + (f"±{limit:g}" if limit else "the limit")
        + " and rewarded as the limit",
        "Among these answers nothing tells PPO which is better.",
        "Scale reward functions to a few units (or --ppo.score-scaling=running_std), raise "
        "--ppo.score-clip, or set it to none.",
        "objective/scores_clipped of the last fifth at least 0.3.",
    )


def _entropy_collapsed(run: RunRecord, stage: Stage) -> Finding | None:
    entropy = ends(stage, "policy/entropy_avg")
    if entropy is None or entropy[0] <= 0.05 or entropy[1] >= 0.2 * entropy[0]:
        return None
    return Finding(
        "The entropy has collapsed",
        stage.name,
        f"policy/entropy_avg {entropy[0]:.3g} → {entropy[1]:.3g} nats a token",
        "The policy says nearly the same each time: it explores no longer, and PPO learns little.",
        "Lower --ppo.actor-learning-rate, raise --ppo.kl-coef, or set --ppo.entropy-coef (0.001 "
        "to 0.01).",
        "policy/entropy_avg of the last fifth below a fifth of that of the first.",
    )


def _critic_explains_nothing(run: RunRecord, stage: Stage) -> Finding | None:
    values = stage.series("critic/vf_explained_var")
    below = sum(value < 0 for value in values)
    if len(values) < MIN_ROWS or below < 0.9 * len(values):
        return None
    return Finding(
        "The critic is worse than a constant",
        stage.name,
        f"critic/vf_explained_var below 0 in {below} of {len(values)} rows, median "
        f"{median(values):.2f}",
        "Its values add noise to the advantages instead of taking some out.",
        "Raise --ppo.critic-learning-rate or --ppo.ppo-epochs; check loss/value_avg: where it "
        "rises, lower the rate instead.",
        "critic/vf_explained_var below 0 in at least 9 of 10 rows.",
    )


def _steps_skipped(run: RunRecord, stage: Stage) -> Finding | None:
    logged = [row.get("val/skipped", row.get("skipped", 0.0)) for row in stage.values]
    rows = sum(value > 0 for value in logged)
    total = run.summary.get(stage.name, {}).get("skipped") or 0
    broken = {name for row in stage.values for name, value in row.items() if math.isnan(value)}
    if not rows and not total and not broken:
        return None
    parts = [f"{total} steps skipped in all"] if total else []
    parts += [f"{rows} of {len(logged)} rows have skipped steps"] if rows else []
    parts += [f"not finite: {', '.join(sorted(broken)[:6])}"] if broken else []
    return Finding(
        "Numbers were not finite",
        stage.name,
        "; ".join(parts),
        "A step whose gradients are not finite is left out. A few are harmless; in a row they "
        "mean that the weights or the data are broken.",
        "Lower the learning rate or warm it up longer, use --dtype float32 to see whether it is "
        "the precision, and look at the rows just before the first one.",
        "A row with skipped steps, a skipped step in summary.json, or a metric that is not finite.",
    )


def _sampler_differs(run: RunRecord, stage: Stage) -> Finding | None:
    values = stage.series("rollout/logprob_diff_mean")
    if not values or median(values) <= 0.05:
        return None
    return Finding(
        "Sampler and training disagree about probabilities",
        stage.name,
        f"rollout/logprob_diff_mean: median {median(values):.3f}, most {max(values):.3f} nats a "
        "token",
        "Ratios are not 1 before the first update: PPO clips and corrects what is only arithmetic.",
        "Use --ppo.old-logprobs train, or --dtype float32 to see whether it is the precision.",
        "Median rollout/logprob_diff_mean above 0.05.",
    )


def _reward_flat(run: RunRecord, stage: Stage) -> Finding | None:
    values = stage.series("objective/scores")
    first, last = fifth(values, 0), fifth(values, 1)
    if len(first) < 3:
        return None
    gain = fmean(last) - fmean(first)
    error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    if gain > 2 * error:
        return None
    fell = gain < -2 * error
    return Finding(
        "The reward fell" if fell else "The reward is flat",
        stage.name,
        f"objective/scores {fmean(first):.3g} → {fmean(last):.3g}: {gain:+.3g} with a standard "
        f"error of {error:.2g}",
        "PPO has not raised the score of what it samples.",
        "Raise --ppo.actor-learning-rate or --ppo.max-steps, lower --ppo.kl-coef; check that the "
        "reward model beats chance and that policy/clipfrac_avg and policy/approxkl_avg are not "
        "0 with several updates an iteration.",
        "Mean objective/scores of the last fifth (3 rows or more) less than two standard errors "
        "above the first.",
    )


def _score_is_not_truth(run: RunRecord, stage: Stage) -> Finding | None:
    names = ("eval/objective/scores", "eval/sampled_right", "eval/sampled_wrong")
    series = [stage.series(name) for name in names]
    if any(len(values) < 2 for values in series):
        return None
    score, right, wrong = (values[-1] - values[0] for values in series)
    if score <= 0 or wrong <= max(right, 0.05):
        return None
    return Finding(
        "The score rose, and wrong answers more than right ones",
        stage.name,
        f"held-out score {score:+.3g}; of the sampled answers {100 * right:+.1f} points are "
        f"right and {100 * wrong:+.1f} wrong",
        "The reward model pays for what only looks like an answer.",
        "Train steps 1 and 2 for longer (--sft.max-steps, --reward.max-steps): PPO cannot find "
        "answers that the policy never gives, or that the reward model does not tell apart.",
        "The last held-out score above the first, and the share of wrong answers up by more than "
        "that of right ones and by more than 5 points.",
    )


def _clipped_much(run: RunRecord, stage: Stage) -> Finding | None:
    shares = ends(stage, "policy/clipfrac_avg")
    if shares is None or shares[1] <= 0.3:
        return None
    return Finding(
        "Updates are clipped much",
        stage.name,
        f"policy/clipfrac_avg of the last fifth {shares[1]:.2f}",
        "Steps are so large that the policy leaves the range in which its samples count.",
        "Lower --ppo.actor-learning-rate or --ppo.ppo-epochs, or set --ppo.target-kl.",
        "policy/clipfrac_avg of the last fifth above 0.3.",
    )


def _near_chance(run: RunRecord, stage: Stage) -> Finding | None:
    names = ("eval/accuracy", "eval/rewards/accuracies")
    values = next(filter(None, map(stage.series, names)), [])
    if len(values) < 2 or values[-1] >= 0.55:
        return None
    return Finding(
        "Held-out preferences are guessed",
        stage.name,
        f"held-out accuracy {values[-1]:.3f}, where chance is 0.5",
        "What is trained against this reward learns noise."
        if stage.name == "reward"
        else "The policy has not learned which answers are preferred.",
        f"Train longer or at another rate (--{stage.name}.learning-rate, "
        f"--{stage.name}.max-steps), and check that chosen and rejected are not swapped.",
        "Last held-out accuracy below 0.55.",
    )


def _overfits(run: RunRecord, stage: Stage) -> Finding | None:
    names = ("eval/cross_entropy", "eval/pair_loss", "eval/loss")
    name = next((name for name in names if len(stage.series(name)) > 1), None)
    if name is None:
        return None
    values = stage.series(name)
    evaluated = max(n for n, row in enumerate(stage.values) if name in row)
    losses = [row.get("loss", math.nan) for row in stage.values[: evaluated + 1]]
    losses = [loss for loss in losses if math.isfinite(loss)]
    trained = fmean(fifth(losses, 1)) if losses else math.inf
    far = values[-1] > max(2 * trained, trained + 0.1)
    rose = values[-1] > 1.05 * min(values) > 0
    if not far and not rose:
        return None
    return Finding(
        f"The held-out loss {'is far above the training loss' if far else 'has risen'}",
        stage.name,
        f"{min(values):.4g} at its lowest, {values[-1]:.4g} at the end"
        + (f"; training loss {trained:.4g}" if losses else ""),
        "The model learns the training rows by heart, or the learning rate is too high.",
        f"Train for fewer steps (--{stage.name}.max-steps or --{stage.name}.num-train-epochs), "
        "at a lower rate, or on more data.",
        "Last of two or more held-out losses more than twice the training loss (its last fifth "
        "until then) and more than 0.1 above it, or more than 5 % above the lowest.",
    )


def _rows_dropped(run: RunRecord, stage: Stage) -> Finding | None:
    rows = run.rows.get(stage.name, {"rows": 0, "dropped": {}})
    dropped = sum(rows["dropped"].values())
    total = rows["rows"] + dropped
    if dropped <= 0.1 * total:
        return None
    length = "ppo.max-prompt-seq-len" if stage.name == "ppo" else f"{stage.name}.max-seq-len"
    return Finding(
        "Many rows are left out",
        stage.name,
        f"{dropped} of {total} train rows: "
        + ", ".join(f"{count} {why}" for why, count in rows["dropped"].items()),
        "The model learns from the rest alone: where long rows are dropped, from the short ones.",
        f"For long rows raise --{length}, or use --data.overlong=cut (of conversations cut_turns).",
        "More than a tenth of the train rows of a stage dropped.",
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "sft": (_rows_dropped, _steps_skipped, _overfits),
    "reward": (_rows_dropped, _steps_skipped, _near_chance, _overfits),
    "dpo": (_rows_dropped, _steps_skipped, _near_chance, _overfits),
    "ppo": (
        _rows_dropped,
        _kl_runs_away, _kl_negative, _only_longer, _truncated, _scores_clipped,
        _entropy_collapsed, _critic_explains_nothing, _steps_skipped, _sampler_differs,
        _reward_flat, _score_is_not_truth, _clipped_much,
    ),
}  # fmt: skip
"""What is looked at, by stage."""


def find(run: RunRecord) -> list[Finding]:
    """All warnings of a run, stage by stage."""
    found = [rule(run, stage) for name, stage in run.stages.items() for rule in RULES.get(name, ())]
    return [finding for finding in found if finding is not None]
