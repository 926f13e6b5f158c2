"""What `--deterministic` asks of XLA, it can compile."""

import pytest

from rlhf_jax.runtime.compilation import DETERMINISTIC
from tests.gpu_programs.programs import Iteration
from tests.gpu_programs.target import WHY_NOT, mesh_of_h200s
from tests.meshes.compiled import fresh_compiler, optimizing_compiler

pytestmark = pytest.mark.gpu_programs


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("name", ["generate", "update"])
def test_it_compiles_and_products_are_those_of_a_library(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", DETERMINISTIC)  # read where attention is chosen
    flags = (flag.removeprefix("--").partition("=") for flag in DETERMINISTIC.split())
    options = {flag: value == "true" for flag, _, value in flags}
    lowered = Iteration(mesh_of_h200s("1x1", 1)).lower(name)
    with optimizing_compiler(), fresh_compiler():
        text = lowered.compile(options).as_text()
    assert text is not None
    assert "gemm_fusion" not in text
    assert "__cudnn" not in text
    assert "__cublas" in text
