"""Programs compiled for H200s, each once a session."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu_programs.programs import Iteration
from tests.gpu_programs.target import WHY_NOT, Program, compile_for_gpu, mesh_of_h200s

Compile = Callable[..., tuple[Iteration, Program]]


@pytest.fixture(scope="session")
def compiled() -> Compile:
    """`compiled("update", "8x1", 8, parts=2)`: the iteration (models, layouts) and its program, by
    the name of `Iteration`'s method, on that mesh and with that inference tensor parallelism.
    """
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)

    @functools.cache
    def make(name: str, mesh: str = "1x1", inference_tp: int = 1, **changes: Any):
        iteration = Iteration(mesh_of_h200s(mesh, inference_tp), **changes)
        return iteration, compile_for_gpu(iteration.lower(name))

    return make
