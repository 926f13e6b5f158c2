"""Lines of the kernels' benchmark: times, rates, and differences from the plain form."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Measured ceilings (bytes/s, FLOP/s) by device kind; other devices get no share.
CEILINGS = {"NVIDIA H200": (4.3e12, 790e12)}
LARGEST_ERROR = {"bfloat16": 2e-2, "float32": 2e-3}  # fp32 products may run in TF32


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    seconds: float
    work: float
    unit: str
    plain_seconds: float | None
    error: float

    def text(self) -> str:
        """The line, aligned with HEADER."""
        memory, compute = CEILINGS.get(jax.devices()[0].device_kind, (None, None))
        ceiling = memory if self.unit == "TB/s" else compute
        rate = self.work / self.seconds
        share = f"{rate / ceiling:6.2f}" if ceiling else "     -"
        plain = "       -" if self.plain_seconds is None else f"{self.plain_seconds * 1e3:8.3f}"
        return (
            f"{self.name:62s} {self.seconds * 1e3:8.3f} {rate / 1e12:8.3f} {self.unit:8s} {share} "
            f"{plain} {self.error:9.1e}"
        )


HEADER = (
    f"{'case':62s} {'ms':>8s} {'rate':>8s} {'unit':8s} {'share':>6s} {'plain ms':>8s} {'error':>9s}"
)


def seconds(run: Callable[[], Any], repeats: int, calls: int) -> float:
    """Best time of one call of `calls` started back to back, after one call to compile."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def difference(got: Any, want: Any, dtype: Any, name: str) -> float:
    """Largest difference over all arrays, relative to each array's largest entry."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        worst = max(worst, float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-6)))
    allowed = LARGEST_ERROR[jnp.dtype(dtype).name]
    if not worst <= allowed:
        raise SystemExit(f"{name}: differs from the plain form by {worst:.1e}, allowed {allowed}")
    return worst


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Standard normal numbers on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
