"""Time of collectives beside computation: against counted points in time; a made-up trace."""

import itertools
import random

import numpy as np
import pytest
from jax.profiler import ProfileData

from scripts.trace_overlap import (
    NS_PER_MS,
    Kernel,
    device_times,
    kernel_name,
    length,
    outside,
    read_kernels,
    read_trace,
    union,
)


def points(intervals) -> np.ndarray:
    """Which of 200 unit steps of time lie in any of the intervals."""
    inside = np.zeros(200, bool)
    for start, end in intervals:
        inside[start:end] = True
    return inside


@pytest.mark.parametrize("seed", range(20))
def test_lengths_are_counts_of_points(seed: int) -> None:
    draw = random.Random(seed)
    mine, cover = (
        [(at := draw.randrange(180), at + draw.randrange(1, 20)) for _ in range(draw.randrange(12))]
        for _ in range(2)
    )
    assert length(union(mine)) == points(mine).sum()
    assert outside(union(mine), union(cover)) == (points(mine) & ~points(cover)).sum()
    merged = union(mine)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


def kernel(name: str, start: float, end: float) -> Kernel:
    return Kernel(name, start * NS_PER_MS, end * NS_PER_MS)


def test_a_device_with_two_collectives() -> None:
    """One half hidden, one alone; two that run at once count once in the sum."""
    times = device_times(
        [
            kernel("gemm", 0, 4),
            kernel("ncclDevKernel_AllGather_RING_LL", 3, 5),
            kernel("gemm", 6, 8),
            kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 9, 10),
            kernel("ncclDevKernel_AllGather_RING_LL", 9, 10),
        ]
    )
    assert (times.wall, times.compute, times.collective) == (10, 6, 3)
    assert times.exposed == 2
    assert times.hidden == pytest.approx(1 / 3)
    assert times.idle == 2
    gather = next(each for each in times.by_name if "AllGather" in each.name)
    assert (gather.count, gather.total, gather.alone) == (2, 3, 2)


def test_without_collectives_nothing_is_exposed() -> None:
    times = device_times([kernel("gemm", 0, 4)])
    assert (times.exposed, times.hidden) == (0, 1)


TRACE = """
planes {
  id: 1
  name: "/device:GPU:1"
  event_metadata { key: 1 value { id: 1 name: "void gemm<float>(int)" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather_RING_LL(Args)" } }
  lines {
    id: 13
    name: "Stream #13(Compute)"
    timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 2000 duration_ps: 5000 }
  }
  lines {
    id: 20
    name: "Stream #20(Compute)"
    timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 4000 duration_ps: 6000 }
  }
  lines {
    id: 99
    name: "XLA Modules"
    timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 900000 }
  }
}
planes { id: 2 name: "/host:CPU" }
"""


def test_a_trace_is_read_stream_by_stream() -> None:
    """Lines that summarise others are no kernels; both streams share a clock."""
    kernels = read_kernels(ProfileData.from_text_proto(TRACE))
    assert kernels == {
        1: [Kernel("gemm", 1002, 1007), Kernel("ncclDevKernel_AllGather_RING_LL", 1004, 1010)]
    }
    assert device_times(kernels[1]).exposed * NS_PER_MS == pytest.approx(3)


def test_a_trace_without_gpus_says_what_is_there(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        read_trace(tmp_path)
    text = 'planes { id: 2 name: "/host:CPU" }'
    serialized = ProfileData.text_proto_to_serialized_xspace(text)
    (tmp_path / "host.xplane.pb").write_bytes(serialized)
    with pytest.raises(ValueError, match="only /host:CPU"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("void cutlass::Kernel2<cutlass_80>(Params)", "cutlass::Kernel2"),
        ("loop_add_fusion_3", "loop_add_fusion_3"),
    ],
)
def test_names_without_arguments(text: str, name: str) -> None:
    assert kernel_name(text) == name
