"""CUDA graphs of decode steps that several GPUs share."""

import os

from meshes.layout import Layout

CAPTURED = "xla_gpu_enable_command_buffer"
OWN_KERNELS = "xla_gpu_experimental_use_collective_kernels"
WITH_SUMS = {
    # What XLA captures by itself, and collectives.
    CAPTURED: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES",
    # None: NCCL's. In a graph XLA's own all-reduce is slower than outside of it (docs/log.md).
    OWN_KERNELS: "",
}


def graph_options(layout: Layout) -> dict[str, str] | None:
    """Compiler options of a program that decodes in `layout`: where GPUs share layers, a step is
    one graph with the sums over GPUs in it. Without them the host launches every sum, and a graph
    between two of them. None elsewhere, and where `XLA_FLAGS` has one of the options.
    """
    device = layout.mesh.abstract_mesh.abstract_device
    flags = os.environ.get("XLA_FLAGS", "")
    if device is None or device.platform != "gpu" or any(name in flags for name in WITH_SUMS):
        return None
    shared = layout.mesh_axes("heads") or layout.mesh_axes("mlp")
    return WITH_SUMS if shared else None
