"""Which metrics share a chart, and the numbers of the charts as the page reads them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from rlhf_jax.runtime.report.reading import RunRecord, Stage

MAX_ROWS = 1500
"""Longer stages are drawn by every so many rows; rows of evaluations stay."""
NUM_COLOURS = 8
PHASES = ("generate", "score", "update", "evaluate", "other")
"""Of a row's time. They keep their colours from stage to stage."""


@dataclass(frozen=True)
class Chart:
    """One chart of a stage.

    Attributes:
        title: what a person calls it.
        patterns: of metric names, as in a shell; each metric goes to the first chart it fits.
        unit: of the vertical axis.
        kind: lines, or areas on top of each other.
        log: starts with a logarithmic axis where all values are above 0.
        zero: the axis starts at 0.
        mark: a horizontal line, such as chance.
    """

    title: str
    patterns: tuple[str, ...]
    unit: str = ""
    kind: Literal["line", "stack"] = "line"
    log: bool = False
    zero: bool = False
    mark: float | None = None


SUPERVISED = (Chart("Gradient norm", ("grad_norm",), log=True),)
COMMON = (
    Chart("Learning rate", ("*learning_rate*", "lr", "lr/*", "*/lr"), zero=True),
    Chart("Skipped steps", ("skipped", "val/skipped", "val/stopped"), "share of steps", zero=True),
    Chart("Time by phase", ("timing_s/*",), "seconds a row", kind="stack", zero=True),
    Chart("Samples a second", ("*samples_per_second*",), zero=True),
    Chart("Tokens a second", ("*tokens_per_second*",), zero=True),
    Chart("TFLOP/s a device", ("*tflops*",), zero=True),
    Chart("Memory", ("*memory*",), "GiB of a device, at most so far", zero=True),
)

CHARTS: dict[str, tuple[Chart, ...]] = {
    "sft": (
        Chart("Loss", ("loss", "eval/loss", "eval/cross_entropy"), "nats a token"),
        Chart("Token accuracy", ("accuracy", "eval/accuracy")),
        Chart("Entropy", ("entropy", "eval/entropy"), "nats a token"),
        *SUPERVISED,
        *COMMON,
    ),
    "reward": (
        Chart("Loss", ("loss", "eval/loss", "eval/pair_loss")),
        Chart("Accuracy on pairs", ("accuracy", "eval/accuracy"), mark=0.5),
        Chart("Scores", ("score_chosen", "score_rejected", "eval/score_chosen",
                         "eval/score_rejected")),
        *SUPERVISED,
        *COMMON,
    ),
    "dpo": (
        Chart("Loss", ("loss", "eval/loss")),
        Chart("Accuracy on pairs", ("rewards/accuracies", "eval/rewards/accuracies"), mark=0.5),
        Chart("Margin", ("rewards/margins", "eval/rewards/margins")),
        Chart("Implicit rewards", ("rewards/chosen", "rewards/rejected", "eval/rewards/chosen",
                                   "eval/rewards/rejected")),
        Chart("Log-probabilities", ("logps/*", "eval/logps/*"), "nats an answer"),
        *SUPERVISED,
        *COMMON,
    ),
    "ppo": (
        Chart("Reward", ("objective/scores", "objective/rlhf_reward", "eval/objective/scores",
                         "eval/ema_objective/scores"), "an answer"),
        Chart("Held-out answers, sampled", ("eval/sampled_*", "eval/ema_sampled_*"), "share",
              zero=True),
        Chart("Held-out answers, greedy", ("eval/greedy_*", "eval/ema_greedy_*"), "share",
              zero=True),
        Chart("Reward parts", ("rewards/*/mean",)),
        Chart("Scores cut off at the score clip", ("objective/scores_clipped",), "share",
              zero=True),
        Chart("KL to the reference", ("objective/kl", "eval/objective/kl",
                                      "eval/ema_objective/kl"), "nats an answer"),
        Chart("KL coefficient", ("objective/kl_coef",)),
        Chart("Entropy", ("policy/entropy_avg",), "nats a token", zero=True),
        Chart("Answer length", ("response_length/mean", "response_length/min",
                                "response_length/max", "eval/response_length/mean",
                                "eval/ema_response_length/mean"), "tokens", zero=True),
        Chart("Answers cut off", ("response_length/clip_ratio", "eval/response_length/clip_ratio",
                                  "eval/ema_response_length/clip_ratio"), "share", zero=True),
        Chart("Clip fraction", ("policy/clipfrac_avg", "val/clipfrac_avg"), "share", zero=True),
        Chart("Change of the policy in a step", ("policy/approxkl_avg",), "nats a token"),
        Chart("Value loss", ("loss/value_avg",), log=True),
        Chart("Explained variance of the critic", ("critic/vf_explained_var",), mark=0.0),
        Chart("Policy loss", ("loss/policy_avg",)),
        Chart("Pretraining loss", ("loss/ptx_avg",), "nats a token"),
        Chart("Sampler and training differ by", ("rollout/logprob_diff*",), "nats a token"),
        Chart("Gradient norms", ("policy/grad_norm", "critic/grad_norm"), log=True),
        *COMMON,
    ),
}  # fmt: skip


def stage_charts(stage: Stage) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The known charts that have a metric, and a plain one for every other metric."""
    left = [name for name in stage.metrics if name != "timing_s/step"]
    known: list[dict[str, Any]] = []
    for chart in CHARTS.get(stage.name, COMMON):
        names = [name for pattern in chart.patterns for name in left if fnmatchcase(name, pattern)]
        names = list(dict.fromkeys(names))
        if names:
            known.append(drawn(chart, names))
            left = [name for name in left if name not in names]
    return known, [drawn(Chart(name, (name,)), [name]) for name in left]


def phase_colours(phases: Sequence[str]) -> list[int]:
    """The known phases by their place in `PHASES`, others behind them."""
    others = [phase for phase in phases if phase not in PHASES]
    return [(PHASES + tuple(others)).index(phase) % NUM_COLOURS for phase in phases]


def drawn(chart: Chart, names: list[str]) -> dict[str, Any]:
    """A chart as the page reads it."""
    colours = [n % NUM_COLOURS for n in range(len(names))]
    if chart.kind == "stack":
        phases = [name.removeprefix("timing_s/") for name in names]
        colours = phase_colours(phases)
        names = [name for _, name in sorted(zip(colours, names, strict=True))]
        colours.sort()
    return {
        "title": chart.title,
        "names": names,
        "colours": colours,
        "unit": chart.unit,
        "kind": chart.kind,
        "log": chart.log,
        "zero": chart.zero,
        "mark": chart.mark,
    }


def curves(run: RunRecord) -> dict[str, Any]:
    """All stages with their charts and values: {"sft": {"steps", "hours", "values", …}}.

    A missing value is null, one that is not finite "x".
    """
    times = [time for stage in run.stages.values() for time in stage.times if time]
    began = min(times, default=0.0)
    return {name: stage_curves(stage, began) for name, stage in run.stages.items()}


def stage_curves(stage: Stage, began: float) -> dict[str, Any]:
    """The values of one stage by metric; minutes count from `began`."""
    kept, every = thinned(stage)
    known, others = stage_charts(stage)
    return {
        "steps": [stage.steps[n] for n in kept],
        "minutes": [round((stage.times[n] - began) / 60, 3) for n in kept],
        "every": every,
        "rows": len(stage.steps),
        "charts": known,
        "others": others,
        "values": {
            name: [plain(stage.values[n].get(name)) for n in kept] for name in stage.metrics
        },
    }


def thinned(stage: Stage) -> tuple[list[int], int]:
    """Which rows are drawn: all, or every n-th, evaluations, broken ones and the last."""
    every = -(-len(stage.steps) // MAX_ROWS) or 1
    last = len(stage.steps) - 1
    kept = [
        n
        for n, row in enumerate(stage.values)
        if n % every == 0 or n == last or any(speaks(name, v) for name, v in row.items())
    ]
    return kept, every


def speaks(name: str, value: float) -> bool:
    """Whether a row with this value is always drawn."""
    return name.startswith("eval/") or not math.isfinite(value)


def plain(value: float | None) -> float | str | None:
    """Five digits are enough to draw, and to read."""
    if value is None:
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else "x"
