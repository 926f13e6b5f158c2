"""A tiny random model as a Hugging Face directory, to try things without the Hub.

    python scripts/make_tiny_checkpoint.py --family llama --out /tmp/tiny
    python scripts/make_tiny_checkpoint.py --family opt --out /tmp/dsc --deepspeed-chat

The tokenizer is the byte tokenizer of the quickstart. With --deepspeed-chat there are two models,
`actor-models/tiny` and `reward-models/tiny`, in the files that steps 1 and 2 of DeepSpeed-Chat
leave (`pytorch_model.bin`; the reward model's tensors are `rwtransformer.*` and `v_head.weight`).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_ROWS, byte_tokenizer
from rlhf_jax.hf.export import save_hf, save_reward_hf
from rlhf_jax.hf.pickle_writer import write_pickle
from rlhf_jax.models import llama, opt
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import init_params, param_specs, scalar_specs, store_layout

CONFIGS: dict[str, ModelConfig] = {
    "opt": opt.size(64, 2, 4, vocab_size=VOCAB_ROWS, max_position_embeddings=512),
    "llama": llama.size(64, 2, 4, 2, 172, VOCAB_ROWS, max_position_embeddings=512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny random Hugging Face model.")
    parser.add_argument("--family", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deepspeed-chat", action="store_true", help="two models, in its files")
    args = parser.parse_args()
    cfg = replace(
        CONFIGS[args.family], bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    if args.deepspeed_chat:
        save_deepspeed_chat(args.out, cfg, args.seed)
    else:
        save_hf(args.out, random_values(param_specs(cfg), cfg, args.seed), cfg, "float32",
                byte_tokenizer())  # fmt: skip
    print(f"{args.family} model of {cfg.num_params():,} parameters: {args.out}")


def random_values(specs: Any, cfg: ModelConfig, seed: int) -> Any:
    """Initial values on one device."""
    layout = store_layout(cfg, make_mesh(parse_mesh("1x1"), 1))
    return init_params(specs, layout, jnp.float32, key=jax.random.key(seed))


def save_deepspeed_chat(out: Path, cfg: ModelConfig, seed: int) -> None:
    """What its steps 1 and 2 leave; the reward model has random weights of its own."""
    actor, reward = out / "actor-models" / "tiny", out / "reward-models" / "tiny"
    save_hf(actor, random_values(param_specs(cfg), cfg, seed), cfg, "float32", byte_tokenizer())
    weights = actor / "model.safetensors"
    tensors = load_file(weights)
    entries = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_pickle(actor / "pytorch_model.bin", entries, tensors.items())
    weights.unlink()
    model = random_values(scalar_specs(cfg), cfg, seed + 1)
    head_W = 0.1 * jax.random.normal(jax.random.key(seed), model.head_W.shape)
    save_reward_hf(
        reward, replace(model, head_W=head_W), cfg, "float32", byte_tokenizer(),
        kind="deepspeed_chat",
    )  # fmt: skip


if __name__ == "__main__":
    main()
