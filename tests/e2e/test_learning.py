"""The quickstart learns: slow, `pytest -m slow`.

Its recipe on one device; DPO with fewer steps. scripts/learning_check.py runs more seeds.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MIN_GAIN, MAX_GREEDY_LOSS = 15.0, 3.0
"""Points of right answers."""

MAX_SHIFT = 0.5
"""Of the mean |log ratio| between the policy that is updated and the one that sampled."""


REUSE = ("--step=3", "--ppo.max-steps=10")
DPO = ("--step=dpo", "--dpo.max-steps=150")


def train(directory: Path, *flags: str) -> Path:
    began = time.perf_counter()
    command = [sys.executable, "-m", "rlhf_jax.train", f"--output-dir={directory}", *flags]
    # Other tests compile with few optimizations: minutes of steps want them all. One thread for one
    # device, beside the tests on the other cores.
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "NPROC": "1"}
    subprocess.run([*command, "--mesh=1x1", "--seed=0"], check=True, env=env)
    print(f"{directory.name}: {time.perf_counter() - began:.0f} s")
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three stages of the default recipe."""
    return train(tmp_path_factory.mktemp("learning") / "whole")


def right_answers(directory: Path, when: str, how: str, stage: str = "ppo") -> float:
    """Their share in percent."""
    results: dict[str, Any] = json.loads((directory / "summary.json").read_text())[stage]
    return 100 * results[when]["judged"][how]["all"]["right"]


def test_ppo_makes_more_sampled_answers_right_and_keeps_the_greedy_ones(whole: Path) -> None:
    gain = right_answers(whole, "after", "sampled") - right_answers(whole, "before", "sampled")
    greedy = right_answers(whole, "after", "greedy") - right_answers(whole, "before", "greedy")
    print(f"right answers: {gain:+.1f} points sampled, {greedy:+.1f} greedy")
    assert gain >= MIN_GAIN
    assert greedy >= -MAX_GREEDY_LOSS


@pytest.mark.parametrize("reuse", ["--ppo.ppo-epochs=4", "--ppo.generation-batches=2"])
def test_reusing_experience_keeps_the_policy_near_the_one_that_sampled(
    whole: Path, tmp_path: Path, reuse: str
) -> None:
    start = [f"--actor-model={whole / 'sft'}", f"--reward-model={whole / 'reward'}"]
    directory = train(tmp_path / "run", "--recipe=quickstart", *start, *REUSE, reuse)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    name = "policy/abs_log_ratio"
    shifts = [row[name] for row in map(json.loads, lines) if name in row]
    assert len(shifts) == 10
    assert max(shifts) < MAX_SHIFT


def test_dpo_does_so_in_place_of_a_reward_model_and_ppo(whole: Path, tmp_path: Path) -> None:
    """From the same step 1, on the pairs that step 2 saw."""
    start = f"--actor-model={whole / 'sft'}"
    directory = train(tmp_path / "dpo", "--recipe=quickstart", start, *DPO)
    for how, least in (("sampled", MIN_GAIN), ("greedy", -MAX_GREEDY_LOSS)):
        before, after = (
            right_answers(directory, when, how, stage="dpo") for when in ("before", "after")
        )
        assert after - before >= least, how
