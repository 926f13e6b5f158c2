"""DeepSpeed-Chat's own rules of training, for comparison."""

from dataclasses import replace

from rlhf_jax.recipes.opt import opt
from rlhf_jax.stages.config import TrainConfig


def deepspeed_chat() -> TrainConfig:
    """The recipe `opt` with DeepSpeed-Chat's rules.

    python -m rlhf_jax.train --recipe=deepspeed-chat --mesh=8x1

    With --deployment-type and --actor-model the rules go with the settings of that size.
    """
    return replace(with_deepspeed_rules(opt()), output_dir="runs/deepspeed-chat")


def with_deepspeed_rules(config: TrainConfig) -> TrainConfig:
    """A recipe under DeepSpeed-Chat's rules; its sizes and rates stay.

    Pairs are compared at every position from where the answers part, pads of the shorter one
    included; the stop token is not trained; advantages and scores are taken as they are; old
    log-probabilities come from one more forward pass; answers are greedy, as OPT's
    generation_config leaves it. The constants are those of dschat/rlhf/ppo_trainer.py. An
    answer's score is read at the last token before its stop token.
    """
    return replace(
        config,
        sft=replace(config.sft, loss_on="all"),
        reward=replace(config.reward, span="divergence", center_coef=0.0),
        ppo=replace(
            config.ppo,
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
