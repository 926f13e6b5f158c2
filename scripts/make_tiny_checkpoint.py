"""A tiny random model as a Hugging Face directory, to try things without the Hub.

    python scripts/make_tiny_checkpoint.py --family llama --out /tmp/tiny

The tokenizer is the byte tokenizer of the quickstart.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_ROWS, byte_tokenizer
from rlhf_jax.hf.export import save_hf
from rlhf_jax.models import llama, opt
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import init_params, param_specs, store_layout

CONFIGS: dict[str, ModelConfig] = {
    "opt": opt.size(64, 2, 4, vocab_size=VOCAB_ROWS, max_position_embeddings=512),
    "llama": llama.size(64, 2, 4, 2, 172, VOCAB_ROWS, max_position_embeddings=512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny random Hugging Face model.")
    parser.add_argument("--family", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cfg = replace(
        CONFIGS[args.family], bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    layout = store_layout(cfg, make_mesh(parse_mesh("1x1"), 1))
    specs: Any = param_specs(cfg)
    params = init_params(specs, layout, jnp.float32, key=jax.random.key(args.seed))
    save_hf(args.out, params, cfg, "float32", byte_tokenizer())
    print(f"{args.family} model of {cfg.num_params():,} parameters: {args.out}")


if __name__ == "__main__":
    main()
