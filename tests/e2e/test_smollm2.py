"""The SmolLM2 recipes on real rows, with a model that a CPU can train."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_jax.cli import parse, to_yaml
from rlhf_jax.data.tokenize import PairRow, tokenize_pairs
from rlhf_jax.evaluation.run_page import page_with
from rlhf_jax.evaluation.runs import Settings, measure_run
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.hf.tokenizer import load_tokenizer
from rlhf_jax.recipes.smollm2 import GSM8K, HELPFUL, SMOLLM2, WIKITEXT, smollm2_hh
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.pipeline import run_pipeline
from rlhf_jax.stages.rows import read_rows

TINY = (
    "--dtype=float32", "--data.chat-format=human_assistant", "--data.max-rows=16",
    "--sft.batch-size=8", "--sft.max-steps=1",
    "--ppo.batch-size=8", "--ppo.minibatch-size=8", "--ppo.max-steps=1",
    "--ppo.max-prompt-seq-len=128", "--ppo.max-answer-seq-len=16", "--ppo.num-eval-prompts=8",
    "--eval-batches=1", "--eval-interval=0",
)  # fmt: skip

type Here = Callable[[str], str]


@pytest.fixture(scope="session")
def here(shared_data: Callable[[str], Path]) -> Here:
    """A path of the recipe, where the data lie here."""

    def find(path: str) -> str:
        name, at, file = path.rpartition("@")
        folder, leaf = file.removeprefix("data/").split("/")
        return f"{name}{at}{shared_data(folder) / leaf}"

    return find


def train(cfg: TrainConfig) -> dict:
    run_pipeline(cfg, to_yaml(cfg))
    return json.loads((Path(cfg.output_dir) / "summary.json").read_text())


def test_one_step_of_every_stage(here, stories, tmp_path) -> None:
    """With pretraining text and the average: all that the recipe turns on runs together, and can
    be measured.
    """
    flags = (
        "--recipe=smollm2-hh", f"--output-dir={tmp_path / 'run'}", f"--actor-model={stories}",
        f"--reward-model={stories}", "--data-path", *map(here, HELPFUL),
        f"--ppo.ptx-path={here(WIKITEXT)}", "--reward.batch-size=8", "--reward.max-steps=1",
        "--reward.max-seq-len=128", "--sft.max-seq-len=128", *TINY,
    )  # fmt: skip
    cfg = parse(flags)
    assert (cfg.ppo.ptx_coef, cfg.ppo.ema.enable) == (0.1, True)
    found = train(cfg)
    assert found["sft"]["eval/perplexity"] > 1
    assert 0 <= found["reward"]["eval/accuracy"] <= 1
    assert np.isfinite(found["ppo"]["after"]["eval/ema_objective/scores"])
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 20, encoding="utf-8")
    settings = Settings(text=str(text), max_rows=8, batch_size=8, mesh="1x1")
    measured = measure_run(tmp_path / "run", settings)
    assert list(measured["text"]) == ["base", "sft", "actor", "actor_ema"]
    assert abs(measured["policies"]["actor_ema"]["kl"]["value"]) < 1
    assert "| score, EMA |" in page_with([measured], "", "run")


def test_right_answers_are_the_only_reward(here, stories, tmp_path) -> None:
    """No reward model is trained or loaded; the share of right answers is what is told."""
    flags = (
        "--recipe=smollm2-gsm8k", f"--output-dir={tmp_path / 'run'}", f"--actor-model={stories}",
        f"--data-path={here(GSM8K)}", *TINY, "--sft.max-seq-len=512", "--data.overlong=cut",
    )  # fmt: skip
    cfg = parse(flags)
    found = train(cfg)
    assert list(found) == ["sft", "ppo"]
    assert not (tmp_path / "run" / "reward").exists()
    for when in ("before", "after"):
        right = found["ppo"][when]["eval/rewards/gsm8k_correct/mean"]
        assert found["ppo"][when]["eval/objective/scores"] == pytest.approx(right)


def test_a_thousand_pairs_are_held_out_and_never_trained_on(here, shared_data) -> None:
    """As SmolLM2's own tokenizer and template write them."""
    folder = shared_data("smollm2-135m-instruct")
    small = find_pretrained("quickstart")
    model = Pretrained(SMOLLM2, small.cfg, load_tokenizer(folder), None, None)
    cfg = smollm2_hh()
    cfg = replace(cfg, data=replace(cfg.data, data_path=tuple(map(here, HELPFUL))))
    rows = read_rows(cfg, "reward", model, tokenize_pairs)

    def prompts(some: list[PairRow]) -> set[bytes]:
        return {row.chosen[: row.prompt_length].tobytes() for row in some}

    assert len(rows.held_out) >= 1000
    assert not prompts(rows.train) & prompts(rows.held_out)
