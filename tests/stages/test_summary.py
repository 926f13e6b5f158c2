"""What the end of a run says."""

import json
import math
from pathlib import Path

import pytest

from rlhf_jax.stages.sft import perplexity
from rlhf_jax.stages.summary import print_summary


def test_a_run_that_diverged_still_ends_with_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = {"objective/scores": 0.25, "objective/kl": 1.0, "response_length/mean": 4.0}
    before = {f"eval/{name}": value for name, value in evaluated.items()}
    after = dict.fromkeys(before)
    results = {
        "sft": {"eval/perplexity": None},
        "ppo": {"before": before, "after": after},
    }
    (tmp_path / "summary.json").write_text(json.dumps(results))
    print_summary(tmp_path, 1.0)
    out = capsys.readouterr().out
    assert "held-out perplexity not finite" in out
    assert "held-out objective/scores: 0.250 -> not finite" in out


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (math.log(7), 7.0), (1000.0, math.inf), (math.nan, math.nan)]
)
def test_perplexity_is_infinite_beyond_a_float(loss: float, expected: float) -> None:
    assert perplexity(loss) == pytest.approx(expected, nan_ok=True)


def test_the_command_at_the_end_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    (run / "sft").mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    print_summary(run, 1.0)
    out = "".join(capsys.readouterr().out.split())
    assert out.endswith(f"rlhf_jax.chat'{run}'".replace(" ", ""))


def test_a_run_with_dpo_says_what_it_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judged(right: float) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        shares = {"all": {"right": right, "wrong": 0.25, "unhelpful": 0.75 - right}}
        return {"judged": {"sampled": shares, "greedy": shares}}

    results = {"before": judged(0.25), "after": judged(0.75), "eval/rewards/accuracies": 0.875}
    (tmp_path / "summary.json").write_text(json.dumps({"dpo": results}))
    (tmp_path / "dpo").mkdir()
    (tmp_path / "dpo_adapter").mkdir()
    print_summary(tmp_path, 1.0)
    out = " ".join(capsys.readouterr().out.split())
    assert "dpo held-out accuracy 0.875" in out
    assert "DPO changed the share of right answers by +50.0 points sampled" in out
    assert "after DPO, a Hugging Face directory" in out
    assert f"{tmp_path}/dpo_adapter/ adapters alone, a PEFT directory" in out
    assert "python -m rlhf_jax.chat" in out
    assert "metrics.jsonl" in out
    assert "samples/" not in out
    (tmp_path / "samples").mkdir()
    print_summary(tmp_path, 1.0)
    assert f"{tmp_path}/samples/" in "".join(capsys.readouterr().out.split())
