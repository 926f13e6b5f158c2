"""What `check_processes.py` calls equal, and where it does not start."""

import math
import sys

import pytest

from scripts import check_processes
from scripts.check_processes import differences

LOSSES = {("sft", 1, "loss"): 2.0, ("sft", 2, "loss"): 1.5, ("ppo", 1, "kl"): math.nan}


def test_equal_runs_have_no_differences() -> None:
    assert differences(LOSSES, LOSSES | {("sft", 1, "loss"): 2.001}) == []


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (LOSSES | {("sft", 2, "loss"): 1.51}, "1.5, not 1.51"),
        (LOSSES | {("ppo", 1, "kl"): 0.0}, "nan, not 0"),
        (LOSSES | {("sft", 3, "loss"): 1.2}, "('sft', 3, 'loss'): only in one"),
    ],
)
def test_runs_that_differ_are_told_apart(theirs: dict, said: str) -> None:
    for mine, other in ((LOSSES, theirs), (theirs, LOSSES)):
        assert len(differences(mine, other)) == 1
    assert said in differences(LOSSES, theirs)[0]


def test_one_gpu_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["check_processes.py"])
    with pytest.raises(SystemExit, match="at least 2 GPUs, visible are 1: use --simulate 2"):
        check_processes.main()
