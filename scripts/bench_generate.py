"""Decode speed beside the memory-bandwidth floor: one command, one table.

    python scripts/bench_generate.py                       # OPT-1.3B, 256 + 256 tokens, one GPU
    python scripts/bench_generate.py --model facebook/opt-6.7b --batch 32 128

Random weights, bf16, sampling at temperature 1, no row ends early. A token's time is the time of
the whole program less that of a program with one new token (prefill), over the tokens between.
The floor is the bytes that a token must read (weights, and keys and values at the mean context)
over the copy bandwidth that the same run measured.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshes.layout import default_inference_tp, make_mesh, parse_mesh
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import init_params, param_specs
from rlhf_jax.models.tiny import quickstart_config


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall-clock time of a call whose result is waited for; one call before warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read and written per second by passes over a large array in device memory."""
    passes = 20
    source = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    run = jax.jit(lambda x: lax.fori_loop(0, passes, lambda _, y: y * 1.0000001, x))
    return 2 * passes * num_bytes / median_seconds(lambda: run(source), 5)


def prompts(rng: np.random.Generator, batch: int, length: int, vocab: int) -> PromptBatch:
    """Random prompts of full length."""
    return PromptBatch(
        tokens_BP=rng.integers(5, vocab, (batch, length)).astype(np.int32),
        lengths_B=np.full(batch, length, np.int32),
        sample_ids_B=np.arange(batch, dtype=np.int32),
        valid_B=np.ones(batch, np.float32),
    )


def bytes_per_token(cfg: ModelConfig, batch: int, context: float, itemsize: int) -> float:
    """Weights once, and keys and values of every row."""
    cache = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_size * batch * context
    return itemsize * (cfg.num_params() + cache)


def main() -> None:
    parser = argparse.ArgumentParser(description="decode speed beside its floor")
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[args.model]
    if args.tiny:
        args.prompt, args.new, args.batch = 16, 16, [8]
    shape = parse_mesh(args.mesh)
    mesh = make_mesh(shape, default_inference_tp(shape, cfg.num_heads, cfg.num_kv_heads))
    bandwidth = copy_bandwidth(2**26 if args.tiny else 2**32)
    engine = HybridEngine(cfg, mesh, ())
    with jax.set_mesh(mesh):
        params = init_params(
            param_specs(cfg), engine.store, jnp.dtype(jnp.bfloat16), key=jax.random.key(0)
        )
    print(
        f"{jax.devices()[0].device_kind}, mesh {shape}, copy bandwidth {bandwidth / 1e12:.2f} TB/s"
    )
    print(f"{args.model}, bf16, {args.prompt} prompt + {args.new} new tokens, temperature 1")
    print("| batch | first token ms | ms a token | tokens/s | floor ms | share of floor |")
    print("|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for batch in args.batch:
        rows = prompts(rng, batch, args.prompt, cfg.vocab_size)

        def seconds(new: int, rows: PromptBatch = rows) -> float:
            sampling = SamplingConfig(max_new_tokens=new)
            return median_seconds(
                lambda: engine.generate(params, rows, sampling, key=jax.random.key(1)),
                args.repeats,
            )

        first, whole = seconds(1), seconds(args.new)
        token = (whole - first) / (args.new - 1)
        floor = bytes_per_token(cfg, batch, args.prompt + args.new / 2, 2) / bandwidth / mesh.size
        print(
            f"| {batch} | {1e3 * first:.1f} | {1e3 * token:.3f} | {batch / token:.0f} "
            f"| {1e3 * floor:.3f} | {floor / token:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
