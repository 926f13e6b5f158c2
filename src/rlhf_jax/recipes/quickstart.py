"""All three stages with a model of 0.3M parameters, from scratch, on a CPU."""

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import DPOConfig, RewardConfig, SFTConfig

MAX_PROMPT = 40
MAX_ANSWER = 12


def quickstart() -> TrainConfig:
    """The built-in model on the built-in tasks, without network or GPU.

    python -m rlhf_jax.train

    Three and a half minutes on 2 idle cores. PPO raises the share of right answers to held-out
    prompts, sampled at temperature 1, from about 0.45 to 0.75 - 0.87 (docs/log.md).
    """
    return TrainConfig(
        output_dir="runs/quickstart",
        actor_model=QUICKSTART,
        reward_model=QUICKSTART,
        dtype="float32",
        data=DataConfig(data_path=(QUICKSTART,), data_split=""),
        sft=quickstart_sft(),
        reward=quickstart_reward(),
        ppo=quickstart_ppo(),
        dpo=quickstart_dpo(),
    )


def quickstart_sft() -> SFTConfig:
    """Step 1: where the skill comes from."""
    return SFTConfig(
        learning_rate=3e-3,
        weight_decay=0.01,
        num_warmup_steps=60,
        final_lr_fraction=0.1,
        adam_beta2=0.98,
        batch_size=64,
        num_train_epochs=2,
        max_steps=800,
        max_seq_len=MAX_PROMPT + MAX_ANSWER,
        loss_on="completion",
        remat="none",
    )


def quickstart_reward() -> RewardConfig:
    """Step 2, from the model of step 1."""
    return RewardConfig(
        learning_rate=1e-3,
        weight_decay=0.01,
        num_warmup_steps=10,
        final_lr_fraction=0.1,
        adam_beta2=0.98,
        batch_size=64,
        max_steps=250,
        max_seq_len=MAX_PROMPT + MAX_ANSWER,
        span="last",
        center_coef=0.01,
        train_from="actor",
        remat="none",
    )


def quickstart_ppo() -> PPOConfig:
    """Step 3. A rate that falls keeps several epochs as good as one."""
    return PPOConfig(
        actor_learning_rate=3e-4,
        critic_learning_rate=1e-3,
        actor_weight_decay=0.01,
        critic_weight_decay=0.01,
        lr_scheduler_type="cosine",
        num_warmup_steps=0,
        adam_beta2=0.98,
        batch_size=64,
        max_steps=50,
        max_prompt_seq_len=MAX_PROMPT,
        max_answer_seq_len=MAX_ANSWER,
        max_prompt_buckets=1,
        num_eval_prompts=576,
        kl_coef=0.1,
        gamma=1.0,
        lam=1.0,
        score_clip=5.0,
        missing_eos_penalty=2.0,
        reset_critic_head=True,
        remat="none",
    )


def quickstart_dpo() -> DPOConfig:
    """Step dpo, from the model of step 1: right answers at temperature 1 from .43 to .89 (seed 0).

    python -m rlhf_jax.train --step 1 dpo

    A small beta lets the rejected answers' probability fall without end, and with it fall answers
    that nobody rejected: at beta 0.1 a fifth of all answers is wrong afterwards, at 1 a tenth.
    """
    return DPOConfig(
        learning_rate=3e-4,
        num_warmup_steps=10,
        final_lr_fraction=0.1,
        adam_beta2=0.98,
        batch_size=64,
        max_steps=250,
        max_seq_len=MAX_PROMPT + MAX_ANSWER,
        beta=1.0,
        num_eval_prompts=576,
        remat="none",
    )
