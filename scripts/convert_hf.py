"""A model in any format that can be read, as a Hugging Face directory of safetensors.

    python scripts/convert_hf.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

FROM is a GGUF file (or a directory with one), a Hugging Face directory, a name on the Hub, or a
PEFT adapter, which is added to its base. Config, tokenizer and chat template come along. The model
is held in memory once, in the dtype that is written.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.hf.export import DtypeName, save_hf
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.params import store_layout


def main() -> None:
    parser = argparse.ArgumentParser(description="Any model as a Hugging Face directory.")
    parser.add_argument("source", metavar="FROM")
    parser.add_argument("out", metavar="TO", type=Path)
    names = get_args(DtypeName)
    parser.add_argument("--dtype", choices=names, default="bfloat16", help="of the weights")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    try:
        convert(args.source, args.out, args.dtype)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def convert(source: str, out: Path, dtype: DtypeName) -> None:
    """ValueError or FileNotFoundError where there is no such model, or TO is there already."""
    if out.exists():
        raise ValueError(f"{out} is there already: give a new directory")
    model = find_pretrained(source)
    if model.is_scalar:
        raise ValueError(f"{source} is a reward model: this converts language models")
    mesh = make_mesh(parse_mesh("1x1"), 1)
    with jax.set_mesh(mesh):
        layout = store_layout(model.cfg, mesh)
        params = model.params(layout, jnp.dtype(dtype), key=jax.random.key(0))
        save_hf(out, params, model.cfg, dtype, model.tokenizer, model.source_config)
    print(f"{out}: {model.cfg.num_params() / 1e6:.1f}M parameters in {dtype}")


if __name__ == "__main__":
    main()
