"""The built-in model of the quickstart: OPT-shaped, about 0.3M parameters, trained from scratch."""

from rlhf_jax.models.config import ModelConfig

QUICKSTART = "quickstart"


def quickstart_config(vocab_size: int, bos: int, eos: int, pad: int) -> ModelConfig:
    """Two layers of width 128. At the usual deviation of 0.02 it does not learn in minutes."""
    width = 128
    return ModelConfig(
        family="opt",
        vocab_size=vocab_size,
        width=width,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        head_size=16,
        mlp_width=256,
        max_positions=64,
        positions="learned",
        norm="layer_norm",
        activation="relu",
        embed_width=width,
        position_offset=2,
        init_std=width**-0.5,
        sinusoid_init=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
