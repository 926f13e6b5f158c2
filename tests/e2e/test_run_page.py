"""A run measured from its directory: the rows that it held out, and what it said of them itself."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_jax.evaluation.run_page import BEGIN, END, page_with
from rlhf_jax.evaluation.runs import Settings, measure_run

SETTINGS = Settings(max_rows=8, batch_size=8, mesh="1x1")
LENGTH = "def length(completion_ids, **rows):\n    return [float(len(i)) for i in completion_ids]\n"


@pytest.fixture(scope="module")
def measured(unbroken) -> dict:
    return measure_run(unbroken.directory, SETTINGS)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoints"))
    return target


def test_the_pairs_are_those_that_the_run_held_out(unbroken, measured) -> None:
    """The run evaluated one batch of 8, of which the summary tells."""
    summary = json.loads((unbroken.directory / "summary.json").read_text())["reward"]
    reward = measured["reward"]
    assert reward["pairs"] == 8
    assert reward["accuracy"]["value"] == pytest.approx(summary["eval/accuracy"])
    for side in ("chosen", "rejected"):
        score = reward["score"][f"{side}_mean"]
        assert score == pytest.approx(summary[f"eval/score_{side}"], abs=1e-4)


def test_the_prompts_are_those_that_the_run_held_out(unbroken, measured) -> None:
    asked = {prompt for _, prompt in unbroken.answers()}
    assert {sample["prompt"] for sample in measured["policies"]["samples"]} <= asked
    assert measured["policies"]["prompts"] == 8
    sft = json.loads((unbroken.directory / "summary.json").read_text())["sft"]
    assert measured["sft"]["after"] == pytest.approx(sft["eval/perplexity"], rel=1e-5)


def test_a_policy_that_did_not_learn_gains_nothing(unbroken, tmp_path) -> None:
    """With step 1's weights as the actor: equal answers, no KL, no gain, equal perplexity."""
    run = copied(unbroken.directory, tmp_path / "run")
    shutil.rmtree(run / "actor")
    shutil.copytree(run / "sft", run / "actor")
    text = tmp_path / "text.txt"
    text.write_text("A line of text.\n" * 20, encoding="utf-8")
    found = measure_run(run, replace(SETTINGS, text=str(text)))
    actor = found["policies"]["actor"]
    assert (actor["kl"]["value"], actor["gain"]["value"], actor["ties"]) == (0, 0, 1)
    assert found["text"]["actor"] == found["text"]["sft"] > 1


def test_reward_functions_score_where_the_run_had_no_reward_model(unbroken, tmp_path) -> None:
    """The number of tokens as the reward is the mean length that is told beside it."""
    file = tmp_path / "rewards.py"
    file.write_text(LENGTH, encoding="utf-8")
    steps = ("--step", "1", "3")
    flags = (*steps, "--ppo.reward-model-weight=0", f"--ppo.reward-fn={file}:length")
    found = measure_run(unbroken.directory, replace(SETTINGS, flags=flags))
    assert found["reward"] is None
    for policy in ("sft", "actor"):
        figures = found["policies"][policy]
        assert figures["score_mean"] == figures["length_mean"] > 0


def test_a_page_is_renewed_around_what_people_wrote(measured) -> None:
    first = page_with([measured], "", "my-run")
    assert first.startswith("# my-run\n")
    assert "![Curves of my-run](my-run.svg)" in first
    written = first.replace("# my-run", "# My run\n\nIt works.") + "\nMore.\n"
    second = dict(measured, seed=77)
    renewed = page_with([measured, second], written, "my-run")
    assert renewed.startswith("# My run\n\nIt works.")
    assert renewed.endswith("\nMore.\n")
    assert renewed.count(BEGIN) == renewed.count(END) == 1
    assert "seed 77" not in written
    assert "| seed 77 |" in renewed


def test_the_curves_are_those_of_the_run(unbroken, measured) -> None:
    """Its few rows are all drawn."""
    lines = {name: line for chart in measured["course"] for name, line in chart["lines"].items()}
    rows = {step: row for (stage, step), row in unbroken.metrics().items() if stage == "ppo"}
    for name in ("objective/scores", "objective/kl", "policy/entropy_avg", "eval/objective/kl"):
        logged = [(step, row[name]) for step, row in rows.items() if name in row]
        assert len(logged) > 1
        np.testing.assert_allclose(lines[name], logged, rtol=1e-4)


def test_a_run_without_a_policy_is_named(unbroken, tmp_path) -> None:
    run = copied(unbroken.directory, tmp_path / "run")
    shutil.rmtree(run / "actor")
    with pytest.raises(ValueError, match="has no actor/"):
        measure_run(run, SETTINGS)
