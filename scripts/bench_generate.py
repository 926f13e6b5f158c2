r"""Decode speed beside the memory-bandwidth floor: one command, one table.

    python scripts/bench_generate.py                       # OPT-1.3B, 256 + 256 tokens, one GPU
    python scripts/bench_generate.py --model facebook/opt-6.7b --batch 32 128
    python scripts/bench_generate.py --model facebook/opt-6.7b --batch 8 64 \
        --weights int8 --kv-cache int8                                 # one byte a number
    python scripts/bench_generate.py --answer-lengths lognormal        # waves against slots

Random weights, bf16 (or rounded as `--weights` and `--kv-cache` say), sampling at temperature 1, no
row ends early. A token's time is the time of the whole program less that of a program with one new
token (prefill), over the tokens between. The floor is the bytes that a token must read (weights,
and keys and values at the mean context) over the copy bandwidth that the same run measured. The
first token's TFLOP/s are those of the matrix products and of causal attention, beside the rate of
one large product in the same run.

With `--answer-lengths lognormal` answers end after so many tokens as a distribution says, the same
for both loops: `--prompts` of them in waves of `--slots` rows, which wait for their longest, and
with slots that are filled again. Passes through the model and busy rows are counted, not measured.
With `stop` they end with the stop tokens of a trained model, on real prompts:

    python scripts/bench_generate.py --answer-lengths stop --checkpoint models/smollm2 \
        --data hh-rlhf-chat@data/hh-rlhf/helpful-base.test.jsonl.gz
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshes.layout import default_inference_tp, make_mesh, parse_mesh
from meshes.multihost import start_devices, to_host
from rlhf_jax.data.batches import PromptBatch, collate_prompts
from rlhf_jax.data.tokenize import tokenize_prompts
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.slot_counts import Passes, passes_in_slots, passes_in_waves
from rlhf_jax.evaluation.reading import read_prompts
from rlhf_jax.inference.session import Model, load
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import SIZES
from rlhf_jax.models.narrow import DTYPES, Narrow, declare_narrow
from rlhf_jax.models.params import Params, init_params, param_specs
from rlhf_jax.models.quantized import is_quantized
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


def matrix_rate(size: int) -> float:
    """Operations per second of square bf16 products, one after the other."""
    products = 20
    normal = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) / size**0.5
    matrix = normal.astype(jnp.bfloat16)
    run = jax.jit(lambda w: lax.fori_loop(0, products, lambda _, x: x @ w, w))
    return products * 2 * size**3 / median_seconds(lambda: run(matrix), 5)


def prompts(rng: np.random.Generator, batch: int, length: int, vocab: int) -> PromptBatch:
    """Random prompts of full length."""
    return PromptBatch(
        tokens_BP=rng.integers(5, vocab, (batch, length)).astype(np.int32),
        lengths_B=np.full(batch, length, np.int32),
        sample_ids_B=np.arange(batch, dtype=np.int32),
        valid_B=np.ones(batch, np.float32),
    )


def tables(cfg: ModelConfig) -> tuple[int, int]:
    """Parameters of the position table and of the vocabulary: a lookup reads one row of each."""
    positions = cfg.position_rows * cfg.width if cfg.positions == "learned" else 0
    return positions, cfg.vocab_size * cfg.embed_width


def bytes_per_token(
    cfg: ModelConfig, batch: int, context: float, weights: Narrow, kv_cache: Narrow
) -> float:
    """Weights once, without tables that are only looked up in, and keys and values of every row:
    two bytes a number, or one and the scales.
    """
    positions, vocabulary = tables(cfg)
    wide = cfg.num_params() - positions - (0 if cfg.tie_embeddings else vocabulary)
    rounded = declare_narrow(param_specs(cfg), weights).layers
    nodes = jax.tree.leaves(rounded, is_leaf=is_quantized)
    matrices = [node for node in nodes if is_quantized(node)]
    narrow = sum(math.prod(matrix.values_FD.shape) for matrix in matrices)
    scales = sum(math.prod(matrix.scale_F.shape) for matrix in matrices)
    heads = 2 * cfg.num_layers * cfg.num_kv_heads * batch * context
    per_head = 2 * cfg.head_size if kv_cache == "same" else cfg.head_size + 4
    return 2 * (wide - narrow) + narrow + 4 * scales + heads * per_head


def prefill_operations(cfg: ModelConfig, batch: int, length: int) -> float:
    """Of the layers' products at every position, causal attention, and logits of one position."""
    positions, vocabulary = tables(cfg)
    layers = cfg.num_params() - positions - (1 if cfg.tie_embeddings else 2) * vocabulary
    attention = 2 * length**2 * cfg.num_heads * cfg.head_size * cfg.num_layers
    return batch * (2 * layers * length + attention + 2 * vocabulary)


def bench_batches(
    engine: HybridEngine, params: Params[jax.Array], args: argparse.Namespace, bandwidth: float
) -> None:
    """A row for each batch size; every answer has `--new` tokens."""
    cfg, devices = engine.cfg, engine.mesh.size
    rate = matrix_rate(256 if args.tiny else 8192)
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s")
    print(f"{args.prompt} prompt + {args.new} new tokens")
    print(
        "| batch | first token ms | TFLOP/s a device | share of matrix rate | ms a token "
        "| tokens/s | floor ms | share of floor |\n|---|---|---|---|---|---|---|---|"
    )
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
        context = args.prompt + args.new / 2
        needed = bytes_per_token(cfg, batch, context, args.weights, args.kv_cache)
        floor = needed / bandwidth / devices
        operations = prefill_operations(cfg, batch, args.prompt) / first / devices
        print(
            f"| {batch} | {1e3 * first:.1f} | {operations / 1e12:.1f} | {operations / rate:.2f} "
            f"| {1e3 * token:.3f} | {batch / token:.0f} | {1e3 * floor:.3f} "
            f"| {floor / token:.2f} |",
            flush=True,
        )


def lognormal_prompts(cfg: ModelConfig, args: argparse.Namespace) -> PromptBatch:
    """Random prompts whose answers end where a distribution says, at most at `--new`."""
    rng = np.random.default_rng(args.seed)
    lengths = rng.lognormal(np.log(args.median), args.sigma, args.prompts)
    limits = np.clip(np.round(lengths), 1, args.new).astype(np.int32)
    rows = prompts(np.random.default_rng(0), args.prompts, args.prompt, cfg.vocab_size)
    return replace(rows, limits_B=limits)


def real_prompts(model: Model, args: argparse.Namespace) -> PromptBatch:
    """Prompts of `--data` that have up to `--prompt` tokens; again from the first where they are
    too few.
    """
    records, what = read_prompts(args.data, None)
    rows, _ = tokenize_prompts(
        records,
        model.tokenizer,
        max_length=args.prompt,
        overlong="drop",
        chat_format="template" if model.tokenizer.chat_template else "human_assistant",
        stop_ids=model.stop_ids,
    )
    if not rows:
        raise SystemExit(f"{what}: none has up to --prompt={args.prompt} tokens")
    asked = [replace(rows[n % len(rows)], sample_id=n) for n in range(args.prompts)]
    return collate_prompts(asked, args.prompts, buckets=(args.prompt,))


def bench_slots(
    engine: HybridEngine, params: Params[jax.Array], rows: PromptBatch, args: argparse.Namespace
) -> None:
    """Both loops over the same prompts, and what of it follows from the answers' lengths alone."""
    count, key = args.slots, jax.random.key(1)
    sampling = SamplingConfig(max_new_tokens=args.new)
    waves = [
        jax.tree.map(lambda array, start=start: array[start : start + count], rows)
        for start in range(0, args.prompts, count)
    ]
    refilling = HybridEngine(
        engine.cfg, engine.mesh, engine.stop_ids,
        slots=count, weights=args.weights, kv_cache=args.kv_cache,
    )  # fmt: skip
    answers: dict[str, Rollout] = {}

    def run_waves() -> None:
        parts = to_host([engine.generate(params, wave, sampling, key=key) for wave in waves])
        answers["waves"] = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)

    def run_slots() -> None:
        answers["slots"] = to_host(refilling.generate(params, rows, sampling, key=key))

    seconds = {
        name: median_seconds(run, args.repeats)
        for name, run in (("waves", run_waves), ("slots", run_slots))
    }
    lengths = {name: np.asarray(rollout.lengths_B) for name, rollout in answers.items()}
    counted: dict[str, Passes] = {
        "waves": passes_in_waves(lengths["waves"], count),
        "slots": passes_in_slots(lengths["slots"], count, engine.rollout.batch_size_divisor),
    }
    print(
        f"{args.prompts} prompts of up to {args.prompt} tokens, {count} rows at once; answers of "
        f"{lengths['waves'].mean():.1f} tokens (median {np.median(lengths['waves']):.0f}, longest "
        f"{lengths['waves'].max()})"
    )
    print("| loop | prefills | decode steps | busy rows | seconds | tokens/s |")
    print("|---|---|---|---|---|---|")
    rates = {name: lengths[name].sum() / seconds[name] for name in seconds}
    for name, passes in counted.items():
        print(
            f"| {name} | {passes.prefills} | {passes.steps} | {passes.busy:.2f} "
            f"| {seconds[name]:.3f} | {rates[name]:.0f} |"
        )
    same = (answers["waves"].tokens_BR == answers["slots"].tokens_BR).all(axis=1).mean()
    print(
        f"slots / waves: tokens/s {rates['slots'] / rates['waves']:.2f}; decode steps fewer by "
        f"{counted['waves'].steps / counted['slots'].steps:.2f}; {same:.0%} of the answers are "
        "equal token by token"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="decode speed beside its floor")
    parser.add_argument("--model", default="facebook/opt-1.3b", choices=sorted(SIZES), metavar="ID")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--inference-tp-size", type=int, help="without: the largest")
    parser.add_argument("--weights", choices=["same", *DTYPES], default="same")
    parser.add_argument("--kv-cache", choices=["same", *DTYPES], default="same")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--answer-lengths", choices=["equal", "lognormal", "stop"], default="equal")
    parser.add_argument("--checkpoint", help="with stop: a directory of Hugging Face, or a run")
    parser.add_argument("--data", help="with stop: prompts, as rlhf_jax.evaluate reads them")
    parser.add_argument("--slots", type=int, default=128, help="rows that decode at once")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--median", type=float, default=80.0, help="of the answer lengths")
    parser.add_argument("--sigma", type=float, default=0.8, help="of their logarithm")
    parser.add_argument("--seed", type=int, default=0, help="of the answer lengths")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.prompt, args.new, args.batch = "the built-in model", 16, 24, [8]
        args.slots, args.prompts, args.median = 16, 128, 8.0
    if args.prompts % args.slots:
        parser.error(f"--prompts={args.prompts} must be a multiple of --slots={args.slots}")
    if (args.answer_lengths == "stop") != (args.checkpoint is not None):
        parser.error("--answer-lengths=stop and --checkpoint belong together")
    return args


def random_model(args: argparse.Namespace) -> tuple[HybridEngine, Params[jax.Array]]:
    """A model of some size on the mesh, whose answers never end by themselves."""
    cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[args.model]
    shape = parse_mesh(args.mesh)
    heads = cfg.num_heads, cfg.num_kv_heads
    asked = args.inference_tp_size
    mesh = make_mesh(shape, default_inference_tp(shape, *heads) if asked is None else asked)
    engine = HybridEngine(cfg, mesh, (), weights=args.weights, kv_cache=args.kv_cache)
    with jax.set_mesh(mesh):
        params = init_params(
            param_specs(cfg), engine.store, jnp.dtype(jnp.bfloat16), key=jax.random.key(0)
        )
    return engine, params


def main() -> None:
    args = parse_args()
    start_devices(args.mesh)
    device = jax.devices()[0].device_kind
    if args.answer_lengths == "stop":
        model = load(args.checkpoint, mesh=args.mesh, dtype="bfloat16")
        assert isinstance(model.params, Params), "a reward model gives no answers"
        print(f"{device}, mesh {args.mesh}; {model.name}, bf16, temperature 1; {args.data}")
        engine = HybridEngine(
            model.config, model.mesh, model.stop_ids, weights=args.weights, kv_cache=args.kv_cache
        )
        bench_slots(engine, model.params, real_prompts(model, args), args)
        return
    engine, params = random_model(args)
    bandwidth = copy_bandwidth(2**26 if args.tiny else 2**32)
    print(f"{device}, mesh {args.mesh}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"{args.model}, bf16, weights {args.weights}, KV cache {args.kv_cache}, temperature 1")
    if args.answer_lengths == "equal":
        bench_batches(engine, params, args, bandwidth)
    else:
        bench_slots(engine, params, lognormal_prompts(engine.cfg, args), args)


if __name__ == "__main__":
    main()
