"""A packed step for GPUs differs from an unpacked one in its attention alone."""

from collections import Counter

import pytest

from tests.gpu_programs import checks
from tests.gpu_programs.conftest import Compile

pytestmark = pytest.mark.gpu_programs


def test_it_moves_the_same_arrays_and_makes_no_attention_scores(compiled: Compile) -> None:
    iteration, packed = compiled("packed", "8x1")
    _, plain = compiled("supervised", "8x1")

    def moved(program) -> Counter[tuple[str, int]]:
        found = program.module.collectives()
        return Counter((one.kind, one.num_bytes) for one in found if one.kind == "all-gather")

    assert moved(packed) == moved(plain)
    assert moved(packed)
    assert checks.quadratic(packed.module, iteration.rows.length) == []
    assert checks.attention_calls(packed.module) == []
    # Forward, forward again (full rematerialisation), and two kernels backward.
    kernels = packed.text.count("__gpu$xla.gpu.triton")
    assert kernels == 4 * iteration.actor.num_layers
    assert packed.memory.temporary < 1.05 * plain.memory.temporary
