"""How much of the collectives of a GPU trace runs beside computation: interval arithmetic.

A collective is exposed where no other kernel of its device runs at the same time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

Interval = tuple[float, float]
COLLECTIVE = re.compile(
    r"nccl|nvshmem|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|memcpyp2p", re.I
)
DEVICE = re.compile(r"/device:GPU:(\d+)")
NS_PER_MS = 1e6


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel (or a copy) on a device, in nanoseconds."""

    name: str
    start: float
    end: float

    @property
    def interval(self) -> Interval:
        return self.start, self.end

    @property
    def is_collective(self) -> bool:
        return COLLECTIVE.search(self.name) is not None


@dataclass(frozen=True)
class Exposed:
    """The collectives of one name: how many, how long, and how long alone; milliseconds."""

    name: str
    count: int
    total: float
    alone: float


@dataclass(frozen=True)
class DeviceTimes:
    """Milliseconds of one device. `wall` is from the first kernel's start to the last one's end."""

    wall: float
    compute: float
    collective: float
    exposed: float
    by_name: Sequence[Exposed]

    @property
    def hidden(self) -> float:
        """The share of the collectives' time beside computation; 1 where there are none."""
        return 1 - self.exposed / self.collective if self.collective else 1.0

    @property
    def idle(self) -> float:
        """When no kernel ran."""
        return self.wall - self.compute - self.exposed


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order, that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Of all intervals together."""
    return sum(end - start for start, end in disjoint)


def outside(intervals: Sequence[Interval], cover: Sequence[Interval]) -> float:
    """The length of disjoint, ordered `intervals` that lies outside of such a `cover`."""
    covered, n = 0.0, 0
    for start, end in intervals:
        while n < len(cover) and cover[n][1] <= start:
            n += 1
        for other_start, other_end in cover[n:]:
            if other_start >= end:
                break
            covered += min(end, other_end) - max(start, other_start)
    return length(intervals) - covered


def device_times(kernels: Sequence[Kernel]) -> DeviceTimes:
    """The times of the kernels of one device."""
    collectives = [kernel for kernel in kernels if kernel.is_collective]
    computing = union(kernel.interval for kernel in kernels if not kernel.is_collective)
    together = union(kernel.interval for kernel in collectives)
    named: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in collectives:
        named[kernel.name].append(kernel)
    by_name = [exposed_of(name, runs, computing) for name, runs in named.items()]
    wall = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    return DeviceTimes(
        wall=wall / NS_PER_MS,
        compute=length(computing) / NS_PER_MS,
        collective=length(together) / NS_PER_MS,
        exposed=outside(together, computing) / NS_PER_MS,
        by_name=sorted(by_name, key=lambda each: -each.alone),
    )


def exposed_of(name: str, runs: Sequence[Kernel], computing: Sequence[Interval]) -> Exposed:
    """The collectives of one name."""
    mine = union(kernel.interval for kernel in runs)
    total, alone = length(mine) / NS_PER_MS, outside(mine, computing) / NS_PER_MS
    return Exposed(name, len(runs), total, alone)


def read_kernels(trace: Any) -> Mapping[int, list[Kernel]]:
    """By GPU, everything that ran on its streams; `trace` is a `jax.profiler.ProfileData`."""
    found: dict[int, list[Kernel]] = {}
    for plane in trace.planes:
        device = DEVICE.fullmatch(plane.name)
        if device is None:
            continue
        found[int(device[1])] = [
            Kernel(kernel_name(event.name), event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return {device: kernels for device, kernels in found.items() if kernels}


def kernel_name(text: str) -> str:
    """Without arguments and template parameters: ncclDevKernel_AllGather_RING_LL."""
    return re.split(r"[(<]", text, maxsplit=1)[0].removeprefix("void ")


def read_trace(directory: Path) -> Mapping[int, list[Kernel]]:
    """The kernels of the newest trace below a directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds no kernel of a GPU.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{directory} holds no trace (*.xplane.pb): was the profiler on?")
    trace = ProfileData.from_file(str(files[-1]))
    kernels = read_kernels(trace)
    if not kernels:
        planes = ", ".join(plane.name for plane in trace.planes)
        raise ValueError(f"{files[-1].name} holds no kernels of a GPU, only {planes}")
    return kernels
