"""OPT on Dahoas/rm-static with DeepSpeed-Chat's settings: corrected, and exactly as they were."""

from dataclasses import replace

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import RewardConfig, SFTConfig


def opt() -> TrainConfig:
    """DeepSpeed-Chat's OPT-1.3B recipe for one node, with this project's corrections.

    Sizes and rates are those of training_scripts/opt/single_node/run_1.3b.sh of each step, with
    8 devices. Corrected (see `deepspeed_chat`): masks from lengths, the trained stop token, scores
    compared at the last token and standardized, whitened advantages, sampling at temperature 1.

    python -m rlhf_jax.train --mesh=8x1 --actor-model=1.3b --reward-model=350m
    """
    return TrainConfig(
        output_dir="runs/opt",
        actor_model="facebook/opt-1.3b",
        reward_model="facebook/opt-350m",
        dtype="bfloat16",
        data=DataConfig(data_path=("Dahoas/rm-static",), data_split="2,4,4"),
        sft=SFTConfig(
            learning_rate=9.65e-6,
            weight_decay=0.0,
            batch_size=64,
            num_train_epochs=16,
            max_seq_len=512,
        ),
        reward=RewardConfig(
            learning_rate=5e-5,
            weight_decay=0.1,
            batch_size=32,
            num_train_epochs=1,
            max_seq_len=512,
        ),
        ppo=PPOConfig(
            actor_learning_rate=9.65e-6,
            critic_learning_rate=5e-6,
            num_warmup_steps=100,
            batch_size=32,
            max_prompt_seq_len=256,
            max_answer_seq_len=256,
        ),
    )


def deepspeed_chat() -> TrainConfig:
    """The recipe `opt` with DeepSpeed-Chat's own rules of training, for comparison.

    Pairs are compared at every position from where the answers part, pads of the shorter one
    included; the stop token is not trained; advantages and scores are taken as they are; old
    log-probabilities come from one more forward pass; answers are greedy, as OPT's
    generation_config leaves it. The constants are those of dschat/rlhf/ppo_trainer.py. An
    answer's score is read at the last token before its stop token.

    python -m rlhf_jax.train --recipe=deepspeed-chat --mesh=8x1
    """
    base = opt()
    return replace(
        base,
        output_dir="runs/deepspeed-chat",
        sft=replace(base.sft, loss_on="all"),
        reward=replace(base.reward, span="divergence", center_coef=0.0),
        ppo=replace(
            base.ppo,
            temperature=0.0,
            kl_coef=0.1,
            kl_kind="k1",
            gamma=1.0,
            lam=0.95,
            clip_range=0.2,
            value_clip_range=0.2,
            value_coef=1.0,
            entropy_coef=0.0,
            score_clip=5.0,
            standardize_score=False,
            missing_eos_penalty=None,
            whiten_advantages=False,
            train_eos=False,
            old_logprobs="train",
        ),
    )
