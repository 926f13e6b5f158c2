"""Times every kernel on the present device, beside its plain form, after checking it against it.

    python scripts/bench_kernels.py                          all kernels, real models' shapes
    python scripts/bench_kernels.py --only decode_attention --cases opt-1.3b
    python scripts/bench_kernels.py --sweep --cases B64      tilings of the decode kernel
    python scripts/bench_kernels.py --tiny                   small shapes, interpreted (CPU)

Columns: milliseconds a call (best of --repeats), what that is in TB/s (decode: keys and values that
have to be read) or TFLOP/s, its share of the card's measured ceiling, milliseconds of the plain
form, and the largest difference from it relative to the plain result's largest entry. Decode calls
run over several caches in turn, so that the card's cache does not hold them. A swept tiling reads
form, block x warps / splits. A half layer is a chain over several weights in turn, as decode runs
it: its plain form is what XLA makes of the same functions.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from kernels_pallas import cases, dispatch
from kernels_pallas.add_norm.api import add_norm
from kernels_pallas.attention.api import attention
from kernels_pallas.decode_attention import pallas, tiling
from kernels_pallas.decode_attention.api import decode_attention
from kernels_pallas.decode_attention.narrow import narrowed
from kernels_pallas.skinny_product.api import (
    product_down,
    product_down_transposed,
    product_up,
    takes_digits,
)
from kernels_pallas.token_logprob.api import token_logprob
from meshes.multihost import check_platform
from rlhf_jax.models.quantized import quantize
from scripts.kernel_rows import HEADER, LARGEST_ERROR, Row, difference, normal, seconds

CACHES_BYTES = 2**28  # several times the card's cache


def attention_rows(case: cases.AttentionCase, args: argparse.Namespace) -> Iterator[Row]:
    """Forward, and forward with backward. FLOPs count what is seen only, backward 2.5 times."""
    B, T, H, G, K = case.batch, case.length, case.query_heads, case.kv_heads, case.head_size
    qkv = [normal(i, (B, T, n, K), args.dtype) for i, n in enumerate((H, G, G))]
    weight = normal(3, (B, T, H, K), args.dtype)
    starts, starts_BT = case.starts(), None
    if starts is not None:
        starts_BT = jnp.broadcast_to(jnp.array(starts, jnp.int32), (B, T))

    def forward(implementation):
        options = {"window": case.window, "implementation": implementation}
        return jax.jit(lambda q, k, v: attention(q, k, v, starts_BT, **options))

    def both(implementation):
        def loss(q, k, v):
            out = forward(implementation)(q, k, v)
            return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    window = T if case.window is None else case.window
    first = starts or [0] * T
    plan = "interpret" if args.tiny and dispatch.target_platform() != "gpu" else None
    visible = sum(min(i + 1 - start, window) for i, start in enumerate(first))
    for suffix, function, factor in ((" forward", forward, 1.0), (" forward+backward", both, 3.5)):
        name = f"attention/{case.name}{suffix}"
        got, want = function(plan), function("reference")
        # All gradients as one array: where a token sees itself alone those of q and k are zero.
        one, other = (ravel_pytree(f(*qkv))[0] for f in (got, want))
        error = difference(one, other, args.dtype, name)
        plain = seconds(lambda f=want: f(*qkv), args.repeats, args.calls)
        fast = seconds(lambda f=got: f(*qkv), args.repeats, args.calls)
        yield Row(name, fast, factor * 4 * B * H * K * visible, "TFLOP/s", plain, error)


def token_logprob_rows(case: cases.TokenLogprobCase, args: argparse.Namespace) -> Iterator[Row]:
    """Values, and values with gradients (which compute the logits a second time)."""
    N, D, V = case.tokens, case.width, case.vocab
    hidden, unembed = normal(0, (N, D), args.dtype), normal(1, (V, D), args.dtype) * 0.05
    targets = jax.random.randint(jax.random.key(2), (N,), 0, case.valid_vocab)
    inputs = hidden, unembed.astype(args.dtype), targets

    def value(implementation):
        return jax.jit(
            functools.partial(
                token_logprob,
                valid_vocab=case.valid_vocab,
                chunk=case.chunk,
                temperature=case.temperature,
                implementation=implementation,
            )
        )

    def both(implementation):
        def loss(hidden, unembed, targets):
            logprob, entropy = value(implementation)(hidden, unembed, targets)
            return jnp.sum(logprob) + 0.1 * jnp.sum(entropy)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    for suffix, function, factor in ((" value", value, 1), (" value+gradient", both, 4)):
        name = f"token_logprob/{case.name}{suffix}"
        got, want = function(None), function("reference")
        error = difference(got(*inputs), want(*inputs), args.dtype, name)
        plain = seconds(lambda f=want: f(*inputs), args.repeats, args.calls)
        fast = seconds(lambda f=got: f(*inputs), args.repeats, args.calls)
        yield Row(name, fast, factor * 2.0 * N * D * V, "TFLOP/s", plain, error)


class DecodeBench:
    """The arrays of one decode case, and the timing of any implementation of the step."""

    def __init__(self, case: cases.DecodeCase, args: argparse.Namespace) -> None:
        self.case, self.args = case, args
        B, S, H, G, K = case.batch, case.cached, case.query_heads, case.kv_heads, case.head_size
        self.positions_B = jnp.asarray(case.row_positions(), jnp.int32)
        self.qkv = normal(0, (B, G, H // G + 2, K), args.dtype)
        self.turn = [normal(i, (B, K), jnp.float32) if case.rope else None for i in (1, 2)]
        per_head = K + 4 if case.form else K * jnp.dtype(args.dtype).itemsize
        size = 2 * B * G * S * per_head
        self.num_caches = 1 if args.tiny else min(32, max(2, -(-CACHES_BYTES // size)))
        read = [max(0, p + 1) if p < S else 0 for p in case.row_positions()]
        read = [n if case.window is None else min(n, case.window) for n in read]
        self.bytes_read = 2.0 * sum(read) * G * per_head

    def caches(self, number: int) -> list[tuple[jax.Array, ...]]:
        """`number` times keys and values, and the scales of both where they have some."""
        case = self.case
        shape = (case.batch, case.kv_heads, case.cached, case.head_size)

        def one(seed: int) -> tuple[jax.Array, ...]:
            wide = normal(seed, shape, self.args.dtype)
            return (wide,) if case.form is None else narrowed(wide, case.form)

        pairs = [zip(one(5 + 2 * n), one(6 + 2 * n), strict=True) for n in range(number)]
        return [tuple(array for both in pair for array in both) for pair in pairs]

    def step(self, **plan: Any) -> Callable[..., Any]:
        """The api with `implementation=`, or the kernel with `tiling=`."""
        if "tiling" in plan:
            interpret = dispatch.target_platform() != "gpu"
            function = functools.partial(pallas.decode_attention, interpret=interpret, **plan)
        else:
            function = functools.partial(decode_attention, **plan)

        def step(qkv: jax.Array, caches: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            scales = caches[2:] or (None, None)
            return function(
                qkv, self.positions_B, *caches[:2], *scales, *self.turn, window=self.case.window
            )

        return step

    def error(self, name: str, **plan: Any) -> float:
        """Output and caches against the plain form; of one byte a number, where rounding may
        differ by a step, the output.
        """
        inputs = self.qkv, self.caches(1)[0]
        got = jax.jit(self.step(**plan))(*inputs)
        want = jax.jit(self.step(implementation="reference"))(*inputs)
        active = (self.positions_B >= 0) & (self.positions_B < self.case.cached)
        got, want = ((jnp.where(active[:, None, None], o, 0), *c) for o, *c in (got, want))
        if self.case.form:
            got, want = got[0], want[0]
        return difference(got, want, self.args.dtype, name)

    def seconds(self, **plan: Any) -> float:
        """Seconds of one step, inside a loop over donated caches as generation runs it."""
        step, rounds = self.step(**plan), self.args.rounds

        def loop(qkv, caches):
            def one_round(_, carry):
                qkv, caches = carry
                new = []
                for cache in caches:
                    out, *cache = step(qkv, cache)
                    new.append(tuple(cache))
                    # Each step waits for the one before.
                    qkv = qkv + out.reshape(*qkv.shape[:2], -1, qkv.shape[3])[:, :, :1] * 0.01
                return qkv, new

            return lax.fori_loop(0, rounds, one_round, (qkv, caches))

        run = jax.jit(loop, donate_argnums=(1,))
        caches = self.caches(self.num_caches)

        def once() -> jax.Array:
            nonlocal caches
            out, caches = run(self.qkv, caches)
            return out

        return seconds(once, self.args.repeats, 1) / (rounds * self.num_caches)


class HalfLayerBench:
    """The arrays of one half layer, several times over, and the timing of any implementation."""

    def __init__(self, case: cases.HalfLayerCase, args: argparse.Namespace) -> None:
        self.case, self.args = case, args
        D, ups = case.width, 2 if case.gated else 1
        itemsize = jnp.dtype(case.form or args.dtype).itemsize
        self.bytes_read = (ups * case.outputs + case.inputs) * D * itemsize
        number = 1 if args.tiny else max(2, -(-CACHES_BYTES // self.bytes_read))
        self.weights = [self.layer(seed) for seed in range(10, 10 + 10 * number, 10)]
        self.x, self.h = (normal(i, (case.rows, D), args.dtype) for i in range(2))

    def layer(self, seed: int) -> dict[str, Any]:
        """Weights of a half layer, by name; sums over their inputs have a deviation near 1. A
        matrix has its scale beside it, or None.
        """
        case, dtype, D = self.case, self.args.dtype, self.case.width

        def matrix(offset: int, rows: int, inputs: int) -> tuple[jax.Array, jax.Array | None]:
            wide = normal(seed + offset, (rows, D), dtype) * jnp.asarray(inputs**-0.5, dtype)
            if case.form is None:
                return wide, None
            rounded = quantize(wide, jnp.dtype(case.form))
            return rounded.values_FD, rounded.scale_F

        down_FD, down_scale_F = matrix(3, case.inputs, case.inputs)
        return {
            "up": matrix(0, case.outputs, D),
            "gate": matrix(1, case.outputs, D) if case.gated else (None, None),
            "bias_F": None if case.gated else normal(seed + 2, (case.outputs,), dtype),
            "down": (down_FD.T if case.form == "int8" else down_FD, down_scale_F),
            "scale_D": normal(seed + 4, (D,), dtype),
            "shift_D": normal(seed + 5, (D,), dtype) if case.layer_norm else None,
        }

    def step(self, x: jax.Array, h: Any, w: Any, plan: str | None, *, chained: bool = False):
        """The residual and the next normalised rows, `chained` in the form that the next product
        takes; `plan` is the kernels' implementation.
        """
        (up_FD, up_scale_F), (gate_FD, gate_scale_F) = w["up"], w["gate"]
        y = product_up(
            h, up_FD, w["bias_F"], gate_FD, up_scale_F, gate_scale_F,
            activation=self.case.activation, implementation=plan,
        )[:, : self.case.inputs]  # fmt: skip
        down = product_down_transposed if self.case.form == "int8" else product_down
        parts = down(y, *w["down"], implementation=plan)
        return self.norm(x, parts, w, plan, chained=chained)

    def norm(self, x: jax.Array, parts: jax.Array, w: Any, plan: str | None, *, chained: bool):
        """What a half layer ends with."""
        digits = chained and takes_digits(x, w["up"][0], w["gate"][0], implementation=plan)
        return add_norm(
            x, parts, w["shift_D"], w["scale_D"], w["shift_D"],
            eps=1e-5, digits=digits, implementation=plan,
        )  # fmt: skip

    def seconds(self, plan: str | None) -> float:
        """Seconds of one half layer inside a loop over all of them."""

        @jax.jit
        def run(x, h, weights):
            def one_round(_, rows):
                x, h = rows
                for w in weights:
                    x, h = self.step(x, h, w, plan, chained=True)
                return x, h

            first = self.norm(x, h[None], weights[0], plan, chained=True)
            return lax.fori_loop(0, self.args.rounds, one_round, first)

        time_taken = seconds(lambda: run(self.x, self.h, self.weights), self.args.repeats, 1)
        return time_taken / (self.args.rounds * len(self.weights))


def half_layer_rows(case: cases.HalfLayerCase, args: argparse.Namespace) -> Iterator[Row]:
    """The implementations that the apis pick (with --tiny: the interpreted kernels)."""
    bench, name = HalfLayerBench(case, args), f"half_layer/{case.name}"
    plan = "interpret" if args.tiny and dispatch.target_platform() != "gpu" else None
    got, want = (
        jax.jit(functools.partial(bench.step, plan=p))(bench.x, bench.h, bench.weights[0])
        for p in (plan, "reference")
    )
    error = difference(got, want, args.dtype, name)
    fast, plain = bench.seconds(plan), bench.seconds("reference")
    yield Row(name, fast, float(bench.bytes_read), "TB/s", plain, error)


def decode_rows(case: cases.DecodeCase, args: argparse.Namespace) -> Iterator[Row]:
    """The implementation that the api picks (with --tiny: the interpreted kernel)."""
    bench, name = DecodeBench(case, args), f"decode_attention/{case.name}"
    implementation = "interpret" if args.tiny and dispatch.target_platform() != "gpu" else None
    error = bench.error(name, implementation=implementation)
    plain = bench.seconds(implementation="reference")
    fast = bench.seconds(implementation=implementation)
    yield Row(name, fast, bench.bytes_read, "TB/s", plain, error)


def sweep_plans(case: cases.DecodeCase, args: argparse.Namespace) -> list[tiling.Tiling]:
    """The chosen tiling first, then those of the command line."""
    heads_per_group = case.query_heads // case.kv_heads
    chosen = tiling.choose(
        case.batch, case.kv_heads, heads_per_group, case.head_size, case.cached, case.window,
        jnp.dtype(case.form or args.dtype).itemsize,
    )  # fmt: skip
    splits = args.splits or sorted({1, chosen.num_splits, 2 * chosen.num_splits})
    # The vector form keeps every head in registers: many of them spill and compile slowly.
    forms = [form for form in args.forms if form == "dot" or heads_per_group <= 4]
    grid = itertools.product(args.blocks, args.warps, splits, (form == "dot" for form in forms))
    return list(dict.fromkeys((chosen, *(tiling.Tiling(*plan) for plan in grid))))


def sweep_rows(case: cases.DecodeCase, args: argparse.Namespace) -> Iterator[Row]:
    """Every tiling as it is measured (the call may run out of time), then the fastest again."""
    bench, rows = DecodeBench(case, args), []
    for number, plan in enumerate(sweep_plans(case, args)):
        form = "dot" if plan.use_dot else "vector"
        mark = " (chosen)" if number == 0 else ""
        name = f"{case.name} {form} {plan.block}x{plan.num_warps}w/{plan.num_splits}{mark}"
        try:
            error = bench.error(name, tiling=plan)
            time_taken = bench.seconds(tiling=plan)
        except jax.errors.JaxRuntimeError as failure:
            print(f"{name}: does not run: {str(failure).splitlines()[0][:120]}", flush=True)
            continue
        rows.append(Row(name, time_taken, bench.bytes_read, "TB/s", None, error))
        yield rows[-1]
    print(f"fastest of {len(rows)} tilings of {case.name}:")
    yield from sorted(rows, key=lambda row: row.seconds)[: args.top]


def parse() -> argparse.Namespace:
    """The command line."""
    kernels = ("attention", "decode_attention", "half_layer", "token_logprob")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="the tests' shapes; runs on a CPU")
    parser.add_argument("--dtype", choices=sorted(LARGEST_ERROR), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="calls started back to back")
    parser.add_argument("--rounds", type=int, default=20, help="decode: rounds over the caches")
    parser.add_argument("--sweep", action="store_true", help="tilings of the decode kernel")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--splits", type=int, nargs="+", help="default: 1, chosen, 2 x chosen")
    forms = ("vector", "dot")
    parser.add_argument("--forms", nargs="+", choices=forms, default=forms)
    parser.add_argument("--top", type=int, default=6, help="fastest tilings shown at the end")
    args = parser.parse_args()
    if args.tiny:
        args.repeats, args.calls, args.rounds = 1, 1, 1
    return args


def main() -> None:
    args = parse()
    check_platform()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.dtype}\n{HEADER}")
    tables: dict[str, tuple[Any, Any, Any]] = {
        "attention": (attention_rows, cases.ATTENTION_TESTS, cases.ATTENTION_BENCHMARKS),
        "decode_attention": (decode_rows, cases.DECODE_TESTS, cases.DECODE_BENCHMARKS),
        "half_layer": (half_layer_rows, cases.HALF_LAYER_TESTS, cases.HALF_LAYER_BENCHMARKS),
        "token_logprob": (
            token_logprob_rows,
            cases.TOKEN_LOGPROB_TESTS,
            cases.TOKEN_LOGPROB_BENCHMARKS,
        ),
    }
    if args.sweep:
        tables = {"decode_attention": (sweep_rows, *tables["decode_attention"][1:])}
    for kernel, (rows, small, large) in tables.items():
        if kernel not in args.only:
            continue
        for case in small if args.tiny else large:
            if args.cases in case.name:
                for row in rows(case, args):
                    print(row.text(), flush=True)


if __name__ == "__main__":
    main()
