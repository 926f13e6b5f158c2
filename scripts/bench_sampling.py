"""Times the choice of a token from logits: the kernel, the plain loop, and sorting.

    python scripts/bench_sampling.py                        real vocabularies
    python scripts/bench_sampling.py --cases B64_k1000 --sweep     blocks and warps of the kernel
    python scripts/bench_sampling.py --tiny                 small shapes, interpreted (CPU)

Microseconds a token of the whole batch, in a loop on the device as generation has it (best of
--repeats). `kernel` has its noise given, the other columns draw it. `sort` and `plain` are what the
kernel stands for: full sorts, and passes over whole rows as one XLA loop. A case that keeps every
token (temperature alone) has no kernel. Tokens are compared with those of sorting first.
"""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import cases, dispatch
from kernels_pallas.truncated_sampling import pallas, reference
from kernels_pallas.truncated_sampling.pallas import Tiling
from kernels_pallas.truncated_sampling.search import Rule

Choose = Callable[..., tuple[jax.Array, jax.Array]]
plain = reference.truncated_sampling
COLUMNS = ("kernel", "kernel + noise", "plain + noise", "sort + noise")
HEADER = f"{'case':44s}" + "".join(f"{name:>16s}" for name in COLUMNS)


def by_sorting(logits: jax.Array, noise: jax.Array, *, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """The same choice from sorted logits; with an empty rule argmax and log-softmax alone."""
    kept = logits
    if rule.counts:
        least = lax.top_k(kept, rule.top_k)[0][:, -1:]
        kept = jnp.where(kept < least, -jnp.inf, kept)
    if rule.weighs:
        falling = -jnp.sort(-kept, axis=-1)
        weight = jax.nn.softmax(falling, axis=-1)
        inside = jnp.cumsum(weight, axis=-1) - weight < rule.top_p
        least = jnp.min(jnp.where(inside, falling, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(kept < least, -jnp.inf, kept)
    if rule.min_p > 0:
        least = kept.max(-1, keepdims=True) + math.log(rule.min_p)
        kept = jnp.where(kept < least, -jnp.inf, kept)
    token = jnp.argmax(kept + noise, -1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


class Bench:
    """One case's logits, and the time of any way to choose from them."""

    def __init__(self, case: cases.SamplingCase, args: argparse.Namespace) -> None:
        self.case, self.args = case, args
        self.rule = Rule(min(case.top_k, case.vocab - 1), case.top_p, case.min_p)
        shape = (case.batch, case.vocab)
        self.logits = jax.random.normal(jax.random.key(0), shape) * case.scale
        self.noise = jax.jit(self.draw)(jnp.int32(0))

    def draw(self, i: jax.Array) -> jax.Array:
        """Gumbel noise for step i, with a key a row as sampling has it."""
        key = jax.random.fold_in(jax.random.key(1), i)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(self.case.batch))
        return jax.vmap(lambda key: jax.random.gumbel(key, (self.case.vocab,)))(keys)

    def micros(self, choose: Choose, drawn: bool = True) -> float:
        """Best time of one choice."""
        rounds = self.args.rounds

        def one(i: jax.Array, carry: Any) -> Any:
            logits, noise, total = carry
            logits, noise, i = lax.optimization_barrier((logits, noise, i))  # nothing is hoisted
            here = self.draw(i) if drawn else noise
            return logits, noise, total + choose(logits, here, rule=self.rule)[1]

        @jax.jit
        def run(logits: jax.Array, noise: jax.Array) -> jax.Array:
            return lax.fori_loop(0, rounds, one, (logits, noise, logits[:, 0]))[2]

        jax.block_until_ready(run(self.logits, self.noise))
        best = math.inf
        for _ in range(self.args.repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(self.logits, self.noise))
            best = min(best, time.perf_counter() - start)
        return best / rounds * 1e6

    def check(self, choose: Choose) -> None:
        """SystemExit unless tokens equal those of sorting (but for sums that round otherwise)."""
        got, want = (
            jax.jit(functools.partial(f, rule=self.rule))(self.logits, self.noise)
            for f in (choose, by_sorting)
        )
        other = int((got[0] != want[0]).sum())
        if other > 0.02 * self.case.batch:
            raise SystemExit(f"{self.case.name}: {other} of {self.case.batch} tokens differ")


def kernel(tiling: Tiling | None = None) -> Choose:
    """The kernel; interpreted where there is no GPU."""
    interpret = dispatch.target_platform() != "gpu"
    return functools.partial(pallas.truncated_sampling, tiling=tiling, interpret=interpret)


def rows(bench: Bench, args: argparse.Namespace) -> Iterator[str]:
    """The lines of one case."""
    name, rule = bench.case.name, bench.rule
    sort = bench.micros(by_sorting)
    if not (rule.counts or rule.weighs or rule.min_p > 0):
        yield f"{name:44s}" + "".join(f"{x:>16s}" for x in ("-", "-", "-", f"{sort:.1f}"))
        return
    bench.check(kernel())
    times = bench.micros(kernel(), False), bench.micros(kernel()), bench.micros(plain), sort
    yield f"{name:44s}" + "".join(f"{x:16.1f}" for x in times)
    for block, warps in itertools.product(args.blocks, args.warps) if args.sweep else ():
        plan = f"{name} {block} x {warps} warps"
        yield f"{plan:44s}{bench.micros(kernel(Tiling(block, warps)), False):16.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="the tests' shapes; runs on a CPU")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50, help="choices in a loop")
    parser.add_argument("--sweep", action="store_true", help="blocks and warps of the kernel")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--warps", type=int, nargs="+", default=[8, 16, 32])
    args = parser.parse_args()
    if args.tiny:
        args.repeats, args.rounds, args.blocks, args.warps = 1, 1, [64], [1]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, microseconds\n{HEADER}")
    for case in cases.SAMPLING_TESTS if args.tiny else cases.SAMPLING_BENCHMARKS:
        if args.cases in case.name:
            for row in rows(Bench(case, args), args):
                print(row, flush=True)


if __name__ == "__main__":
    main()
