"""The course of a run: the metrics worth a curve, in few enough numbers for a page's JSON."""

from typing import Any

import numpy as np

from rlhf_jax.runtime.report.charts import stage_charts
from rlhf_jax.runtime.report.reading import RunRecord, Stage

SHOWN = {
    "sft": ("Loss",),
    "reward": ("Accuracy on pairs",),
    "dpo": ("Accuracy on pairs", "Margin"),
    "ppo": (
        "Reward",
        "Held-out answers, sampled",
        "KL to the reference",
        "Answer length",
        "Answers cut off",
        "Entropy",
        "Clip fraction",
        "Explained variance of the critic",
        "Pretraining loss",
    ),
}
"""Of the report's charts."""

LEFT_OUT = (
    "objective/rlhf_reward", "response_length/min", "response_length/max", "val/clipfrac_avg",
)  # fmt: skip
NUM_POINTS = 100
"""Of a metric that every step logs; rows in between are averaged."""

type Points = list[tuple[float, float]]


def course(record: RunRecord) -> list[dict[str, Any]]:
    """The charts of all stages, each with `lines`: points (step, value) by metric."""
    return [
        {key: chart[key] for key in ("title", "unit", "zero", "mark")}
        | {"stage": stage.name, "lines": lines}
        for stage in record.stages.values()
        for chart in stage_charts(stage)[0]
        if chart["title"] in SHOWN.get(stage.name, ())
        and (lines := {n: points(stage, n) for n in chart["names"] if n not in LEFT_OUT})
    ]


def points(stage: Stage, name: str) -> Points:
    """All values of an evaluation, means of neighbours of others; what is not finite is missing."""
    pairs = [
        (step, row[name])
        for step, row in zip(stage.steps, stage.values, strict=True)
        if np.isfinite(row.get(name, np.nan))
    ]
    if is_held_out(name) or len(pairs) <= NUM_POINTS:
        parts = [[pair] for pair in pairs]
    else:
        parts = np.array_split(np.array(pairs), NUM_POINTS)
    return [(rounded(step), rounded(value)) for step, value in (np.mean(p, axis=0) for p in parts)]


def is_held_out(name: str) -> bool:
    """Whether a metric is of an evaluation."""
    return name.startswith("eval/")


def rounded(value: float) -> float:
    """Five digits are enough to draw."""
    return float(f"{value:.5g}")
