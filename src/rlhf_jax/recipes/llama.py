"""Llama-2 7B as actor and as reward model, with DeepSpeed-Chat's sizes."""

from dataclasses import replace

from rlhf_jax.recipes.opt import opt
from rlhf_jax.stages.config import TrainConfig

LLAMA_2_7B = "meta-llama/Llama-2-7b-hf"


def llama() -> TrainConfig:
    """Sizes and rates of training_scripts/llama2/run_llama2_7b.sh of each step, with 8 devices.

    python -m rlhf_jax.train --recipe=llama --mesh=8x1
    """
    base = opt()
    return replace(
        base,
        output_dir="runs/llama",
        actor_model=LLAMA_2_7B,
        reward_model=LLAMA_2_7B,
        sft=replace(base.sft, batch_size=32, num_train_epochs=4),
        reward=replace(base.reward, learning_rate=9.65e-6, batch_size=64),
    )
