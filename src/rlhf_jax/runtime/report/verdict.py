"""What a run has reached, in figures and a sentence, from its summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_jax.runtime.report.reading import RunRecord

NAMES = {
    "sft": "Step 1: supervised fine-tuning",
    "reward": "Step 2: reward model",
    "dpo": "Step dpo: direct preference optimization",
    "ppo": "Step 3: PPO",
}

WATCHED = {
    "sft": ("loss", "eval/cross_entropy"),
    "reward": ("loss", "accuracy"),
    "dpo": ("loss", "rewards/accuracies"),
    "ppo": ("objective/scores", "objective/kl", "response_length/mean"),
}
"""What is said of a stage that has not ended: first and last value."""


@dataclass(frozen=True)
class Figure:
    """One number that a person looks for first; `before` where training changed it."""

    name: str
    now: str
    before: str | None = None


def stage_name(name: str) -> str:
    """What a stage is called in full."""
    return NAMES.get(name, name)


def number(value: float | None) -> str:
    """Three digits behind the point, fewer of large numbers; null was not finite."""
    if value is None or not math.isfinite(value):
        return "not finite"
    value = round(value, 3) + 0.0  # no -0.000
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float) -> str:
    """One digit behind the point."""
    return f"{100 * value:.1f} %"


def figures(run: RunRecord) -> list[Figure]:
    """The results of the stages that ended."""
    found: list[Figure] = []
    for stage, key, name, unit in (
        ("sft", "eval/perplexity", "SFT: held-out perplexity", "rows"),
        ("reward", "eval/accuracy", "Reward model: held-out accuracy", "pairs"),
        ("dpo", "eval/rewards/accuracies", "DPO: held-out accuracy", "pairs"),
    ):
        results = run.summary.get(stage, {})
        if key in results:
            found.append(Figure(name + of(results, unit), number(results[key])))
    for stage in ("dpo", "ppo"):
        found += changes(stage, run.summary.get(stage, {}))
    return found


def of(results: Mapping[str, Any], unit: str) -> str:
    """How many rows a held-out figure is of, where the summary has it."""
    return f" ({results['held_out_rows']} {unit})" if "held_out_rows" in results else ""


def changes(stage: str, results: Mapping[str, Any]) -> list[Figure]:
    """What PPO or DPO changed on held-out prompts."""
    before, after = results.get("before") or {}, results.get("after") or {}
    label = stage.upper()
    found = [
        Figure(f"{label}: {name}", number(after[key]), number(before[key]))
        for key, name in (
            ("eval/objective/scores", "held-out score" + of(results, "prompts")),
            ("eval/objective/kl", "KL to the reference, nats an answer"),
            ("eval/response_length/mean", "answer length, tokens"),
        )
        if key in before and key in after
    ]
    for key, name in (
        ("eval/ema_objective/scores", "held-out score, moving average"),
        ("eval/ema_objective/kl", "KL, moving average"),
    ):
        if key in after:
            found.append(Figure(f"{label}: {name}", number(after[key])))
    for how in ("sampled", "greedy"):
        if before.get("judged") and after.get("judged"):
            then, now = before["judged"][how]["all"], after["judged"][how]["all"]
            name = f"{label}: right answers, {how}"
            found.append(Figure(name, percent(now["right"]), percent(then["right"])))
    return found


def verdict(run: RunRecord, num_findings: int) -> str:
    """The run in one sentence."""
    results = {stage: run.summary.get(stage, {}) for stage in ("ppo", "dpo")}
    stage = next((name for name in results if results[name].get("before")), None)
    warned = f"{num_findings} warning{'s' * (num_findings != 1)} below" if num_findings else ""
    if stage is None:
        open_stages = [name for name in run.wanted if name not in run.summary]
        text = f"Not finished: {', '.join(open_stages)}. {progress(run, open_stages)}"
        text = text if open_stages else "All stages that were asked for have ended."
        return f"{text} {warned}.".strip(" .") + "."
    parts = sentence_parts(stage, results[stage]["before"], results[stage]["after"])
    text = "; ".join(parts) or f"{stage.upper()} has ended"
    return f"{text}. {warned}.".strip(" .") + "."


def progress(run: RunRecord, open_stages: Sequence[str]) -> str:
    """Where the stage in progress is; nothing before its first row."""
    stage = next((run.stages[name] for name in open_stages if name in run.stages), None)
    if stage is None:
        return ""
    parts = [f"{stage.name} is at step {stage.steps[-1]}"]
    for name in WATCHED.get(stage.name, ()):
        logged = zip(stage.steps, stage.values, strict=True)
        found = [
            (step, row[name]) for step, row in logged if math.isfinite(row.get(name, math.nan))
        ]
        if len(found) > 1:
            parts.append(f"{name} {number(found[0][1])} → {number(found[-1][1])}")
        elif found:
            parts.append(f"{name} {number(found[0][1])} at step {found[0][0]}")
    return f"{', '.join(parts)}."


def sentence_parts(stage: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Score, distance and truth before and after."""
    parts: list[str] = []
    then, now = (side.get("eval/objective/scores") for side in (before, after))
    if then is not None and now is not None:
        kl, length = after.get("eval/objective/kl"), "eval/response_length/mean"
        moved = f"from {number(then)} to {number(now)}"
        verb = "raised" if now > then else "lowered"
        if number(then) == number(now):
            verb, moved = "left", f"at {number(now)}"
        parts.append(
            f"{stage.upper()} {verb} the held-out score {moved} with a KL of {number(kl)} nats an "
            "answer"
        )
        if before.get(length) and after.get(length):
            change = round(100 * (after[length] / before[length] - 1))
            how = f"{abs(change)} % {'longer' if change > 0 else 'shorter'}"
            parts.append(f"answers are {how if change else 'as long as before'}")
    elif "eval/objective/scores" in before:
        parts.append(f"the held-out score after {stage.upper()} is not finite")
    if before.get("judged") and after.get("judged"):
        shares = [side["judged"]["sampled"]["all"]["right"] for side in (before, after)]
        right = f"right answers (sampled): {percent(shares[0])} → {percent(shares[1])}"
        parts.append(right if parts else f"{stage.upper()}: {right}")
    return parts
