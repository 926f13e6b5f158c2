"""PPO's programs for GPUs on rows that share sequences, beside those on rows alone."""

from collections import Counter

import pytest

from tests.gpu_programs import checks
from tests.gpu_programs.conftest import Compile
from tests.gpu_programs.target import Program

pytestmark = pytest.mark.gpu_programs

CASES = [("update", "8x1"), ("score", "8x1"), ("update", "1x1")]
KERNELS = {"update": (4, 4, 0), "score": (1, 1, 1)}
"""Of attention, a layer of the actor (or reference), critic and reward model: forward, forward
again (full rematerialisation) and two backward."""


def moved(program: Program) -> Counter[str]:
    """Bytes of collectives but sums, by kind."""
    found = Counter[str]()
    for one in program.module.collectives():
        if one.kind != "all-reduce":
            found[one.kind] += one.num_bytes
    return found


def summed(program: Program) -> int:
    """Bytes of sums over devices."""
    found = program.module.collectives()
    return sum(one.num_bytes for one in found if one.kind == "all-reduce")


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_no_activation_crosses_devices_and_layers_compute_less(
    compiled: Compile, name: str, mesh: str
) -> None:
    """The collectives of the program without packing, but that gradients of position tables are
    summed whole, and that a score gathers tokens and numbers of rows that are dealt out; no matrix
    of attention scores; no more memory, but that those gathers may join one of weights.
    """
    iteration, packed = compiled(f"packed_{name}", mesh)
    _, plain = compiled(name, mesh)
    assert not moved(plain) - moved(packed)
    limit = checks.SMALL if name == "score" else 0
    assert (moved(packed) - moved(plain)).total() <= limit
    assert (moved(plain).total() > checks.SMALL) == (mesh != "1x1")
    both = iteration.actor, iteration.critic
    tables = 4 * sum(model.position_rows * model.width for model in both)
    more = tables if name == "update" and mesh != "1x1" else 0
    assert summed(packed) - summed(plain) <= more
    sequence = iteration.places(1).length
    assert checks.quadratic(packed.module, sequence) == []
    assert checks.attention_calls(packed.module) == []
    models = *both, iteration.critic
    kernels = sum(n * m.num_layers for n, m in zip(KERNELS[name], models, strict=True))
    assert packed.text.count("__gpu$xla.gpu.triton") == kernels
    assert packed.memory.temporary <= plain.memory.temporary * (1.01 if name == "score" else 1)
