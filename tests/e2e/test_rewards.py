"""Step 3 with reward functions alone, and with a reward model that has its own tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.hf.export import save_reward_hf
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.params import scalar_specs, store_layout
from tests.models.cases import LLAMA, put_params, random_values
from tests.stages.test_retokenized import words_tokenizer

JUDGES = """
def length(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def asks(prompts, completions, **columns):
    return [float(len(text)) if len(text) % 2 else None for text in prompts]
"""


@pytest.fixture
def judges(tmp_path: Path) -> str:
    file = tmp_path / "judges.py"
    file.write_text(JUDGES, encoding="utf-8")
    return str(file)


def test_functions_alone_need_no_reward_model(run, small, tmp_path: Path, judges: str) -> None:
    changes = {
        "mesh": "4x2",
        "step": (3,),
        "ppo.max_steps": 2,
        "ppo.score_clip": None,
        "ppo.reward_model_weight": 0.0,
        "ppo.reward_fn": (f"{judges}:length", f"{judges}:asks"),
        "ppo.reward_fn_weights": (0.5, 2.0),
    }
    made = run(small(tmp_path / "run", changes))
    row = made.metrics()["ppo", 2]
    assert row["rewards/length/mean"] == pytest.approx(row["response_length/mean"])
    lines = (made.directory / "samples" / "ppo.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    for sample in samples:
        asked = len(sample["prompt"])
        left = sample["score"] - (2.0 * asked if asked % 2 else 0.0)
        assert left in [0.5 * n for n in range(1, 25)], sample
    assert not (made.directory / "reward").exists()
    critic = find_pretrained(str(made.directory / "critic"), scalar=True)
    assert critic.is_scalar
    assert critic.cfg.width == find_pretrained("quickstart").cfg.width


@pytest.fixture
def words_scorer(tmp_path: Path) -> str:
    """A reward model that reads whole words, where the actor reads bytes."""
    tokenizer = words_tokenizer()
    cfg = replace(LLAMA, vocab_size=len(tokenizer), max_positions=160, tie_embeddings=True,
                  eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    mesh = make_mesh(parse_mesh("8x1"), 1)
    specs = scalar_specs(cfg)
    with jax.set_mesh(mesh):
        model = put_params(random_values(specs, seed=4), specs, store_layout(cfg, mesh))
        save_reward_hf(tmp_path / "words", model, cfg, "float32", tokenizer, None)
    statistics: dict[str, Any] = {"mean": 1.0, "std": 2.0}
    (tmp_path / "words" / "score_statistics.json").write_text(json.dumps(statistics))
    return str(tmp_path / "words")


def test_a_reward_model_with_other_tokens_reads_text(
    run, small, tmp_path: Path, judges: str, words_scorer: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    changes = {
        "mesh": "4x2",
        "step": (3,),
        "reward_model": words_scorer,
        "ppo.max_steps": 2,
        "ppo.score_clip": None,
        "ppo.reward_model_weight": 3.0,
        "ppo.reward_fn": (f"{judges}:length",),
    }
    with pytest.raises(ValueError, match="different tokenizers .* --ppo.critic-from=actor"):
        run(small(tmp_path / "run", changes))
    made = run(small(tmp_path / "run", changes | {"ppo.critic_from": "actor"}))
    assert "words, which reads re-tokenised text, 1 x length; the critic" in capsys.readouterr().out
    row = made.metrics()["ppo", 2]
    total = 3.0 * row["rewards/reward_model/mean"] + row["rewards/length/mean"]
    np.testing.assert_allclose(row["objective/scores"], total, rtol=1e-4)
    assert row["rewards/reward_model/std"] > 0
    assert row["rewards/reward_model/num_cut"] == 0
    assert made.metrics()["ppo", 0]["eval/rewards/reward_model/std"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo.reward_fn": ("nowhere:f",)}, "there is no module nowhere"),
        ({"ppo.reward_fn": ("rlhf_jax.rewards.gsm8k:gsm8k_correct",)}, "needs answer, which the"),
    ],
)
def test_what_is_known_before_the_run(
    run, small, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(small(tmp_path / "run", {"step": (1, 3), "ppo.reward_model_weight": 0.0} | changes))
    assert not (tmp_path / "run").exists()
