"""Speed of a supervised train step, in model TFLOP/s: one command, one table.

    python scripts/bench_step.py                            # OPT-1.3B, T=512, one GPU
    python scripts/bench_step.py --model facebook/opt-6.7b --batch 16

Random weights and tokens, bf16 with float32 masters and AdamW. Model FLOPs are 6 N a token and the
causal half of attention, forward and backward; recomputation is not counted.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.batches import TextBatch
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import create_state
from rlhf_jax.engine.step import train_step
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import compute_layout, init_params, param_specs, store_layout
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss
from rlhf_jax.stages.supervised_config import SFTConfig


def model_flops(cfg: ModelConfig, rows: int, length: int) -> float:
    """6 N a token, and 6 T^2 D a layer and row for causal attention."""
    attention = 6 * length**2 * cfg.num_heads * cfg.head_size * cfg.num_layers
    return rows * (6 * cfg.num_params() * length + attention)


def measure(cfg: ModelConfig, mesh, rows: int, length: int, settings: SFTConfig, repeats: int):
    """Median seconds of a step, and the compiled program's memory analysis."""
    store, compute = store_layout(cfg, mesh), compute_layout(cfg, mesh)
    optimizer = make_optimizer(OptimizerConfig(1e-5), param_specs(cfg), 100)
    params = init_params(param_specs(cfg), store, jnp.dtype(jnp.bfloat16), key=jax.random.key(0))
    state = create_state(params, optimizer)
    update = jax.jit(
        partial(
            train_step,
            loss_fn=partial(sft_batch_loss, cfg=settings, model=cfg, layout=compute),
            weight_fn=partial(num_predictions, loss_on="all"),
            optimizer=optimizer,
            num_parts=settings.gradient_accumulation_steps,
        ),
        donate_argnums=0,
    )
    tokens = np.random.default_rng(0).integers(5, cfg.vocab_size, (rows, length)).astype(np.int32)
    full = np.full(rows, length, np.int32)
    batch = put_batch(
        TextBatch(tokens, full, np.ones(rows, np.int32), np.ones(rows, np.float32)), compute
    )
    program = update.lower(state, batch).compile()
    times, metrics = [], {}
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - began)
    assert np.isfinite(float(metrics["loss"])), metrics
    memory = program.memory_analysis()
    assert memory is not None
    return statistics.median(times[1:]), memory


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of a train step")
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--remat", default="full", choices=["none", "full", "dots"])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[args.model]
    if args.tiny:
        args.length, args.batch = 48, [16]
    shape = parse_mesh(args.mesh)
    mesh = make_mesh(shape, shape.tensor)
    print(f"{jax.devices()[0].device_kind}, mesh {shape}, {args.model}, bf16, remat {args.remat}")
    print("| batch | length | step ms | model TFLOP/s a device | state GB | temporary GB |")
    print("|---|---|---|---|---|---|")
    for rows in args.batch:
        settings = SFTConfig(batch_size=rows, remat=args.remat)
        with jax.set_mesh(mesh):
            seconds, memory = measure(cfg, mesh, rows, args.length, settings, args.repeats)
        rate = model_flops(cfg, rows, args.length) / seconds / mesh.size
        state, temporary = memory.argument_size_in_bytes / 1e9, memory.temp_size_in_bytes / 1e9
        print(
            f"| {rows} | {args.length} | {1e3 * seconds:.1f} | {rate / 1e12:.0f} "
            f"| {state:.1f} | {temporary:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
