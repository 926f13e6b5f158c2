"""What a compiled program says about itself: its collectives, and the compiler's complaints."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

COLLECTIVE = re.compile(
    r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)
GATHERED = re.compile(r"= (\w+\[[\d,]*\])\S* all-gather\(")

REDUCED = re.compile(r"= (.*) (?:all-reduce|reduce-scatter)(?:-start)?\(")
TYPE = re.compile(r"\w+\[[\d,]*\]")

REMATERIALIZED = "Involuntary full rematerialization"
"""XLA's warning, on stderr, that it replicates an array because it knows no cheaper way."""


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many collectives of each kind stand in the program's text (once in a loop's body)."""
    return dict(Counter(COLLECTIVE.findall(program.as_text() or "")))


def gathered(program: jax.stages.Compiled) -> set[str]:
    """Types of what all-gathers produce, such as `f32[8,128]`."""
    return set(GATHERED.findall(program.as_text() or ""))


def reduced(program: jax.stages.Compiled) -> set[str]:
    """Types of what is summed over devices."""
    sums = (REDUCED.search(line) for line in (program.as_text() or "").splitlines())
    return {kind for found in sums if found for kind in TYPE.findall(found[1])}


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Bytes on one device beside arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@contextmanager
def optimizing_compiler() -> Iterator[None]:
    """A program as a run compiles it: tests compile with few optimizations (`conftest.py`)."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """No compilation cache: a cached program brings no messages of the compiler."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
