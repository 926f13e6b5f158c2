"""Whole programs lower for an H200 where only JAX's CPU wheels are installed.

Tracing takes the paths of a GPU, kernels with their limits included; no compiler runs. cuDNN's
calls are traced only: JAX lowers them for devices that are there. So what lowers has the plain
attention of whole rows in their place.
"""

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from kernels_pallas.attention import api as attention
from meshes.layout import abstract_mesh, parse_mesh
from tests.gpu_programs.programs import GQA, Iteration

H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
KERNEL = "__gpu$xla.gpu.triton"
PROGRAMS = ["generate", "score", "update", "supervised"]


def on_h200s(mesh: str, inference_tp: int | None = None, **changes) -> Iteration:
    shape = parse_mesh(mesh)
    devices = abstract_mesh(shape, inference_tp or shape.fsdp * shape.tensor)
    return Iteration(devices.update(abstract_device=H200), **changes)


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GPU_ORDER", ("reference",))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
@pytest.mark.usefixtures("plain_attention")
def test_programs_lower(mesh: str, name: str) -> None:
    """Generate with a kernel a layer or more."""
    iteration = on_h200s(mesh)
    kernels = iteration.lower(name).as_text().count(KERNEL)
    assert (kernels >= iteration.actor.num_layers) == (name == "generate")


@pytest.mark.parametrize(
    "changes", [{"actor": GQA}, {"slots": 8}, {"inference_tp": 2}], ids=["gqa", "slots", "tp2"]
)
@pytest.mark.usefixtures("plain_attention")
def test_other_forms_of_generate_lower(changes) -> None:
    assert on_h200s("8x1", **changes).lower("generate").as_text().count(KERNEL) >= 2


@pytest.mark.parametrize("name", ["generate", "update"])
def test_whole_rows_attend_by_cudnn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose version JAX asks of the CUDA wheels."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    traced = on_h200s("4x2").trace(name)
    assert str(traced.jaxpr).count("dot_product_attention_fwd_wrapper") >= 2


def test_packed_rows_attend_in_the_kernel() -> None:
    """Of a layer: forward, forward again (full rematerialisation), and two kernels backward."""
    iteration = on_h200s("4x2")
    kernels = iteration.lower("packed").as_text().count(KERNEL)
    assert kernels == 4 * iteration.actor.num_layers


@pytest.mark.usefixtures("plain_attention")
def test_parts_of_a_batch_are_one_body() -> None:
    """Four parts are as many matrix products as one."""
    whole, parts = (on_h200s("1x1", parts=n).lower("update").as_text() for n in (1, 4))
    assert parts.count("stablehlo.dot_general") == whole.count("stablehlo.dot_general") > 0
