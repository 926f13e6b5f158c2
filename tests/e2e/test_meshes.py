"""A real model on real text: the same run on one device and on eight.

`test_resume.py` compares meshes that cut layers, `tests/engine/test_parity.py` one step on all.
"""

import gzip
import json
from pathlib import Path

import pytest

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import RewardConfig, SFTConfig

NUM_ROWS = 64
MESHES = ("1x1", "8x1")


@pytest.fixture(scope="module")
def short_dialogues(shared_data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shortest rows of HH-RLHF in which both answers reply to one prompt, as JSON lines."""
    file = shared_data("hh-rlhf") / "helpful-base.test.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as text:
        rows = [json.loads(line) for line in text]
    rows = [row for row in rows if is_pair(row["chosen"], row["rejected"])]
    rows.sort(key=lambda row: max(len(row["chosen"]), len(row["rejected"])))
    path = tmp_path_factory.mktemp("hh") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:NUM_ROWS]), encoding="utf-8")
    return path


def is_pair(chosen: str, rejected: str) -> bool:
    prompts = [text.rpartition("\n\nAssistant:")[0] for text in (chosen, rejected)]
    return prompts[0] == prompts[1] and chosen != rejected


def config(mesh: str, model: Path, data: Path, directory: Path) -> TrainConfig:
    return TrainConfig(
        output_dir=str(directory),
        actor_model=str(model),
        reward_model=str(model),
        mesh=mesh,
        dtype="float32",
        seed=3,
        data=DataConfig(data_path=(str(data),), data_split="", eval_fraction=0.125),
        sft=SFTConfig(learning_rate=3e-4, batch_size=8, max_steps=3, max_seq_len=96),
        reward=RewardConfig(
            learning_rate=3e-4, batch_size=8, max_steps=3, max_seq_len=96, remat="none"
        ),
        ppo=PPOConfig(
            actor_learning_rate=3e-3,
            critic_learning_rate=3e-4,
            num_warmup_steps=0,
            batch_size=8,
            max_steps=2,
            max_prompt_seq_len=56,
            max_answer_seq_len=16,
            num_eval_prompts=8,
            remat="none",
        ),
        log_interval=1,
        eval_batches=1,
    )


def test_both_meshes_take_the_same_steps(
    stories, short_dialogues, run, same_metrics, tmp_path
) -> None:
    """Sampled tokens are identical, and so losses agree: float32, three stages."""
    one, other = [run(config(mesh, stories, short_dialogues, tmp_path / mesh)) for mesh in MESHES]
    answers = one.answers()
    assert any(answer != answers[0, prompt] for (_, prompt), answer in answers.items())
    assert other.answers() == answers
    same_metrics(one.metrics(), other.metrics(), rtol=1e-3, atol=1e-4)
