"""Times the choice of a token from logits, noise in it: the kernels, the plain loop, and sorting.

    python scripts/bench_sampling.py                        real vocabularies
    python scripts/bench_sampling.py --cases B64_k1000      one of them
    python scripts/bench_sampling.py --tiny                 small shapes, interpreted (CPU)

Microseconds a token of the whole batch, in a loop on the device as generation has it (best of
--repeats). `chosen` is what `truncated_sampling` takes, `sort` and `plain` are what the kernels
stand for: full sorts, and passes over whole rows as one XLA loop. Where nothing is searched
(temperature and min-p alone) there is no kernel. Tokens are compared with those of sorting first.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import cases, dispatch
from kernels_pallas.truncated_sampling import pallas, reference
from kernels_pallas.truncated_sampling.api import truncated_sampling
from kernels_pallas.truncated_sampling.search import Rule
from meshes.multihost import check_platform

Choose = Callable[..., tuple[jax.Array, jax.Array]]
plain = reference.truncated_sampling
COLUMNS = ("chosen", "plain", "sort")
HEADER = f"{'case':44s}" + "".join(f"{name:>16s}" for name in COLUMNS)


def by_sorting(logits: jax.Array, keys: jax.Array, *, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """The same choice from sorted logits; with an empty rule argmax and log-softmax alone."""
    kept, vocab = logits, logits.shape[1]
    noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.wrap_key_data(key), (vocab,)))(keys)
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

    def keys(self, i: jax.Array) -> jax.Array:
        """The rows' keys for step i."""
        key = jax.random.fold_in(jax.random.key(1), i)
        rows = jnp.arange(self.case.batch)
        return jax.random.key_data(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    def micros(self, choose: Choose) -> float:
        """Best time of one choice."""
        rounds = self.args.rounds

        def one(i: jax.Array, carry: Any) -> Any:
            logits, total = carry
            logits, i = lax.optimization_barrier((logits, i))  # nothing is hoisted
            return logits, total + choose(logits, self.keys(i), rule=self.rule)[1]

        @jax.jit
        def run(logits: jax.Array) -> jax.Array:
            return lax.fori_loop(0, rounds, one, (logits, logits[:, 0]))[1]

        jax.block_until_ready(run(self.logits))
        best = math.inf
        for _ in range(self.args.repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(self.logits))
            best = min(best, time.perf_counter() - start)
        return best / rounds * 1e6

    def check(self, choose: Choose) -> None:
        """SystemExit unless tokens equal those of sorting (but for sums that round otherwise)."""
        got, want = (
            jax.jit(functools.partial(f, rule=self.rule))(self.logits, self.keys(jnp.int32(0)))
            for f in (choose, by_sorting)
        )
        other = int((got[0] != want[0]).sum())
        if other > 0.02 * self.case.batch:
            raise SystemExit(f"{self.case.name}: {other} of {self.case.batch} tokens differ")


def chosen(logits: jax.Array, keys: jax.Array, *, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """What sampling calls; the kernels are interpreted where there is no GPU."""
    searches = rule.counts or rule.weighs
    if searches and dispatch.target_platform() != "gpu":
        return pallas.truncated_sampling(logits, keys, rule=rule, interpret=True)
    return truncated_sampling(logits, keys, top_k=rule.top_k, top_p=rule.top_p, min_p=rule.min_p)


def row(bench: Bench) -> str:
    """The line of one case."""
    name, rule = bench.case.name, bench.rule
    if not (rule.counts or rule.weighs or rule.min_p > 0):
        return f"{name:44s}" + "".join(
            f"{x:>16s}" for x in ("-", "-", f"{bench.micros(by_sorting):.1f}")
        )
    bench.check(chosen)
    return f"{name:44s}" + "".join(f"{bench.micros(f):16.1f}" for f in (chosen, plain, by_sorting))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="the tests' shapes; runs on a CPU")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50, help="choices in a loop")
    args = parser.parse_args()
    if args.tiny:
        args.repeats, args.rounds = 1, 1
    check_platform()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, microseconds\n{HEADER}")
    for case in cases.SAMPLING_TESTS if args.tiny else cases.SAMPLING_BENCHMARKS:
        if args.cases in case.name:
            print(row(Bench(case, args)), flush=True)


if __name__ == "__main__":
    main()
