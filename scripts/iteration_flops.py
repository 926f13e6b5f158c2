"""Floating-point operations of a PPO iteration: what it needs, and what DeepSpeed-Chat counts."""

from dataclasses import dataclass

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.models.remat import repeats_layers
from rlhf_jax.runtime.profile import deepspeed_flops
from rlhf_jax.stages.ppo_config import PPOConfig


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    actor: ModelConfig
    critic: ModelConfig
    ppo: PPOConfig

    @property
    def length(self) -> int:
        return self.ppo.max_prompt_seq_len + self.ppo.max_answer_seq_len


def forward_flops(cfg: ModelConfig, rows: int, length: int, logits: int) -> float:
    """Products with the layers' matrices, causal attention, and `logits` positions of a row."""
    heads = cfg.num_heads * cfg.head_size
    matrices = 3 if cfg.activation == "silu_gated" else 2
    layer = cfg.width * (cfg.qkv_rows + heads + matrices * cfg.mlp_width)
    per_row = cfg.num_layers * (2 * layer * length + 2 * heads * length**2)
    return rows * (per_row + 2 * logits * cfg.vocab_size * cfg.embed_width)


def model_flops(setting: Setting) -> float:
    """Of one iteration: one pass of the actor over every token to sample it, one of each model to
    score, three of actor and critic to train (two where their matrices are frozen).
    """
    cfg, rows, length = setting.ppo, setting.ppo.batch_size, setting.length
    answer = cfg.max_answer_seq_len
    actor = forward_flops(setting.actor, rows, length, answer)
    critic = forward_flops(setting.critic, rows, length, 0)
    passes = 2 + (cfg.old_logprobs == "train") + (2 if cfg.actor_lora.dim else 3)
    return passes * actor + (2 + (2 if cfg.critic_lora.dim else 3)) * critic


def deepspeed_figures(setting: Setting, seconds: dict[str, float]) -> dict[str, float]:
    """TFLOP/s of generation and training, and end-to-end samples/s, as perf.py counts them."""
    cfg, rows, length = setting.ppo, setting.ppo.batch_size, setting.length

    def passes(model: ModelConfig, lora: LoRAConfig) -> float:
        adapted = 1 - 2 * lora.dim / model.width if lora.dim else 0.0
        return (4 if repeats_layers(cfg.remat) else 3) - adapted

    generated = deepspeed_flops(setting.actor, rows, length, 1)
    trained = sum(
        deepspeed_flops(model, rows, length, 1) * passes(model, lora)
        for model, lora in (
            (setting.actor, cfg.actor_lora),
            (setting.critic, cfg.critic_lora),
        )
    )
    generate, train = seconds["generate"], seconds["update"]
    return {
        "generation": generated / generate,
        "training": trained / train,
        "total": (generated + trained) / (generate + train),
        "samples": rows / (generate + train),
    }
