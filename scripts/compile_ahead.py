"""Compiles an iteration's programs at the same time, before the first iteration asks for them.

Each is found in JAX's persistent cache when it is called. On a machine with many cores an iteration
is ready when its slowest program is.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.stages.ppo import collect, update


class Recorded:
    """Stands for a jitted function: a call starts to compile it for its arguments and returns
    zeros, or with `abstract` only what they would be.
    """

    def __init__(
        self, name: str, jitted: Any, pool: ThreadPoolExecutor, *, abstract: bool = False
    ) -> None:
        self.name, self.jitted, self.pool, self.abstract = name, jitted, pool, abstract
        self.compiled: Future[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lowered = self.jitted.lower(*args, **kwargs)
        self.compiled = self.pool.submit(compile_lowered, self.name, lowered)
        made = jax.eval_shape(self.jitted, *args, **kwargs)
        return made if self.abstract else jax.tree.map(zeros, made)


class RecordedEngine(HybridEngine):
    """Compiles what `generate` would run."""

    def __init__(self, engine: HybridEngine, pool: ThreadPoolExecutor) -> None:
        self.__dict__.update(engine.__dict__)
        inner: Callable[..., Any] = engine._generate
        self.recorded: list[Recorded] = []

        def recorded(sampling: Any) -> Recorded:
            self.recorded.append(Recorded("generate", inner(sampling), pool))
            return self.recorded[-1]

        self._generate = recorded


def compile_lowered(name: str, lowered: Any) -> Any:
    """The program; says how long it took."""
    began = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - began
    print(f"compiled {name} {seconds:.0f} s", file=sys.stderr, flush=True)
    return program


def zeros(made: Any) -> jax.Array:
    """Zeros where an array would be."""
    return jnp.zeros(made.shape, made.dtype, device=made.sharding)


def compile_ahead(bench: Any, control: Any, host: Any) -> None:
    """Until generate, score and update of a `bench_rlhf.Bench` are compiled."""
    run, data, programs = bench.run, bench.data, bench.programs
    with ThreadPoolExecutor(3) as pool:
        engine = RecordedEngine(bench.engine, pool)
        score = Recorded("score", programs.score, pool)
        step = Recorded("update", programs.update, pool, abstract=True)
        standing = replace(programs, score=score, update=step)
        batches, *_ = collect(run, bench.roles, control, engine, standing, host, data, 0)
        update(run, bench.roles, None, engine, standing, data, batches, 0)
        for one in (*engine.recorded, score, step):
            assert one.compiled is not None, "an iteration runs all three"
            one.compiled.result()
    run.timer.take()
