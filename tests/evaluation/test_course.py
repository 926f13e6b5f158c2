"""Curves of several seeds: what is drawn is what was logged."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from rlhf_jax.evaluation.course import NUM_POINTS, course, points
from rlhf_jax.evaluation.course_svg import Scale, picture, ticks_of
from rlhf_jax.evaluation.run_page import curves, phases
from rlhf_jax.runtime.report.reading import RunRecord, Stage

SVG = "{http://www.w3.org/2000/svg}"


def stage(name: str, rows: list[dict[str, float]]) -> Stage:
    return Stage(name, list(range(len(rows))), [0.0] * len(rows), rows)


def record(slope: float) -> RunRecord:
    """A line of 11 steps; held out it is evaluated at both ends."""
    rows: list[dict[str, float]] = [{"objective/scores": slope * n, "lr": 1.0} for n in range(11)]
    for n in (0, 10):
        rows[n]["eval/objective/scores"] = 10.0
    return RunRecord(directory=None, stages={"ppo": stage("ppo", rows)})  # pyright: ignore


def test_long_stages_are_averaged_and_evaluations_kept() -> None:
    values = np.random.default_rng(0).normal(size=NUM_POINTS * 3)
    rows = [{"loss": float(value)} for value in values]
    rows[7]["eval/loss"] = 3.0
    found = points(stage("sft", rows), "loss")
    want = values.reshape(NUM_POINTS, 3).mean(axis=1)
    np.testing.assert_allclose([value for _, value in found], want, rtol=1e-4)
    assert [step for step, _ in found][:2] == [1, 4]
    assert points(stage("sft", rows), "eval/loss") == [(7, 3.0)]


def test_what_is_not_finite_is_left_out() -> None:
    rows = [{"loss": 1.0}, {"loss": math.nan}, {}, {"loss": 2.0}]
    assert points(stage("sft", rows), "loss") == [(0, 1.0), (3, 2.0)]


def rise(path: str) -> float:
    """From the first point of `M1 2L3 4…` to the last; up is less in an SVG."""
    heights = [float(point.split()[1]) for point in path.removeprefix("M").split("L")]
    return heights[0] - heights[-1]


def test_a_line_a_seed_goes_through_what_was_logged() -> None:
    runs = [{"seed": n, "course": course(record(slope))} for n, slope in enumerate((1.0, 0.5))]
    (chart,) = runs[0]["course"]
    assert (chart["stage"], chart["title"]) == ("ppo", "Reward")
    drawn = ElementTree.fromstring(picture(runs, "a<b"))
    assert drawn.findtext(f"{SVG}title") == "a<b: seeds 0, 1"
    paths = [path.get("d", "") for path in drawn.iter(f"{SVG}path") if path.get("class") == "c0"]
    one, other = (rise(path) for path in paths)
    assert one > 0
    assert other == pytest.approx(one / 2, abs=0.2)
    held = [path for path in drawn.iter(f"{SVG}path") if path.get("class") == "c1 held"]
    assert len(held) == 2
    assert len(list(drawn.iter(f"{SVG}circle"))) == 4
    labels = [span.text for span in drawn.iter(f"{SVG}tspan")]
    assert labels == ["training", "held out"]


def test_every_colour_is_there_in_both_schemes() -> None:
    text = picture([{"seed": 0, "course": course(record(1.0))}], "a")
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert text.count(f"{name}: #") == 2, name


def test_runs_without_curves_are_named() -> None:
    with pytest.raises(ValueError, match="hh: no run has curves"):
        picture([{"seed": 0}], "hh")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-0.03, 0.11), (2.01, 2.6), (0, 0), (5, 5), (-1e-9, 3e5), (-7, -7)]
)
def test_ticks_hold_all_values_and_are_few_and_round(low: float, high: float) -> None:
    ticks = ticks_of(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 7
    steps = np.diff(ticks)
    np.testing.assert_allclose(steps, steps[0])
    assert f"{steps[0]:e}"[0] in "125"


def test_a_scale_takes_its_ends_to_its_ends() -> None:
    scale = Scale(2, 4, 100, 50)
    assert (scale(2), scale(3), scale(4)) == (100, 75, 50)


def test_the_mean_over_seeds_is_of_all_of_them() -> None:
    """Two seeds that do not move were evaluated at other steps: no mean may move either."""
    steps = [(0, 10, 20), (0, 5, 20)]
    runs = [
        {"curve": [{"step": step, "objective/scores": score} for step in each]}
        for each, score in zip(steps, (1.0, 3.0), strict=True)
    ]
    lines = [line for line in curves(runs).splitlines() if line[2:3].isdigit()]
    assert lines == ["| 0 | 2.000 |", "| 10 |  |", "| 20 | 2.000 |"]


def test_a_stage_that_one_run_lacks_has_the_seconds_of_the_others() -> None:
    runs = [{"seconds": {"reward": {"all": 4.0}, "ppo": {"all": 2.0}}}]
    runs.append({"seconds": {"ppo": {"all": 4.0}}})
    assert "| reward | all | 4.0 |\n| ppo | all | 3.0 |" in phases(runs)
