"""SmolLM2-135M-Instruct on one GPU: a chat model from preferences, and one from right answers.

The data are files in `data/`, under the directory that a run starts from; docs/runs/README.md
says which, and the flags for other places.
"""

from dataclasses import replace

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.engine.ema import EMAConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import DPOConfig, RewardConfig, SFTConfig

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
HELPFUL = (
    "hh-rlhf-chat@data/hh-rlhf/helpful-base.test.jsonl.gz",
    "hh-rlhf-chat@data/hh-rlhf/helpful-rejection-sampled.test.jsonl.gz",
)
"""Anthropic's test splits; the recipe splits them anew."""
GSM8K = "gsm8k@data/gsm8k/gsm8k_test.jsonl.gz"
"""The test split, split anew too."""
WIKITEXT = "data/text/wikitext-2-valid.txt.gz"
"""What PTX mixes in; perplexity is measured on wikitext-2-test."""


def smollm2_hh() -> TrainConfig:
    r"""All three stages on HH-RLHF's helpful rows, with pretraining text and a moving average.

    python scripts/fetch_smollm2.py models/smollm2
    python -m rlhf_jax.train --recipe=smollm2-hh --actor-model=models/smollm2 \
        --reward-model=models/smollm2

    Every stage sees all rows but the held-out ones. The reward model starts from the untuned
    model, which was better than from that of step 1 (docs/log.md).
    """
    return TrainConfig(
        output_dir="runs/smollm2-hh",
        actor_model=SMOLLM2,
        reward_model=SMOLLM2,
        mesh="1x1",
        dtype="bfloat16",
        data=DataConfig(data_path=HELPFUL, data_split="", eval_fraction=0.22, overlong="cut_turns"),
        sft=sft(),
        reward=RewardConfig(
            learning_rate=5e-5, num_warmup_steps=10, batch_size=32, max_seq_len=512, remat="none"
        ),
        ppo=PPOConfig(
            actor_learning_rate=3e-5,
            critic_learning_rate=5e-5,
            num_warmup_steps=10,
            batch_size=128,
            minibatch_size=64,
            max_steps=110,
            max_prompt_seq_len=256,
            max_answer_seq_len=128,
            max_prompt_buckets=1,
            kl_coef=0.03,
            missing_eos_penalty=1.0,
            reset_critic_head=True,
            ptx_coef=0.1,
            ptx_path=WIKITEXT,
            ema=EMAConfig(enable=True, decay=0.99),
            num_eval_prompts=256,
            remat="none",
        ),
        dpo=DPOConfig(batch_size=32, num_warmup_steps=10, remat="none"),
        eval_interval=25,
        eval_batches=40,
    )


def sft(num_train_epochs: int = 1) -> SFTConfig:
    """Step 1."""
    return SFTConfig(
        learning_rate=3e-5,
        num_warmup_steps=10,
        batch_size=32,
        num_train_epochs=num_train_epochs,
        max_seq_len=512,
        loss_on="completion",
        remat="none",
    )


def smollm2_gsm8k() -> TrainConfig:
    """Step 1 on GSM8K's solutions, then PPO whose only reward is a right number.

    python -m rlhf_jax.train --recipe=smollm2-gsm8k --actor-model=models/smollm2
    """
    base = smollm2_hh()
    return replace(
        base,
        step=(1, 3),
        output_dir="runs/smollm2-gsm8k",
        data=DataConfig(data_path=(GSM8K,), data_split="", eval_fraction=0.2),
        sft=sft(num_train_epochs=3),
        ppo=replace(
            base.ppo,
            actor_learning_rate=1e-5,
            max_steps=60,
            max_answer_seq_len=256,
            kl_coef=0.02,
            lam=1.0,
            missing_eos_penalty=None,
            reward_model_weight=0.0,
            reward_fn=("rlhf_jax.rewards.gsm8k:gsm8k_correct",),
            critic_from="actor",
            ptx_coef=0.0,
            ptx_path=None,
            num_eval_prompts=320,
        ),
    )
