"""Llama-2 7B as actor and as reward model: DeepSpeed-Chat's scripts, with 8 devices."""

from dataclasses import replace

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.recipes.opt import FOUR_DATA_SETS, lora, rows
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import DPOConfig, RewardConfig, SFTConfig

LLAMA_2_7B = "meta-llama/Llama-2-7b-hf"


def llama_2_7b() -> TrainConfig:
    """training_scripts/llama2/run_llama2_7b.sh of each step. Their step 2 reads rm-static alone.

    python -m rlhf_jax.train --deployment-type=single_node --actor-model=meta-llama/Llama-2-7b-hf
    """
    return TrainConfig(
        output_dir="runs/llama-2-7b",
        actor_model=LLAMA_2_7B,
        reward_model=LLAMA_2_7B,
        dtype="bfloat16",
        data=DataConfig(data_path=FOUR_DATA_SETS, data_split="2,4,4"),
        sft=SFTConfig(learning_rate=9.65e-6, num_train_epochs=4, **rows(4, "single_node")),
        reward=RewardConfig(learning_rate=9.65e-6, weight_decay=0.1, **rows(8, "single_node")),
        ppo=PPOConfig(
            actor_weight_decay=0.1,
            critic_weight_decay=0.1,
            offload_reference_model=True,
            **rows(1, "single_node"),
        ),
        dpo=DPOConfig(offload_reference_model=True, **rows(8, "single_node")),
    )


def llama_2_7b_lora() -> TrainConfig:
    """run_llama2_7b_lora.sh of each step.

    python -m rlhf_jax.train --recipe=llama-2-7b-lora --mesh=8x1
    """
    base = llama_2_7b()
    return replace(
        base,
        output_dir="runs/llama-2-7b-lora",
        sft=replace(base.sft, lora=lora(128)),
        reward=replace(base.reward, lora=lora(128)),
        dpo=replace(base.dpo, lora=lora(128)),
        ppo=replace(base.ppo, actor_lora=lora(64), critic_lora=lora(64)),
    )
