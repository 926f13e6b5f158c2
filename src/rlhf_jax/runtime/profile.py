"""Wall-clock time of phases, and DeepSpeed-Chat's throughput figures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from rlhf_jax.models.config import ModelConfig


class PhaseTimer:
    """Seconds by phase since the last `take`. A phase ends when its results are on the device."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[list[object]]:
        """Times its body; what the body appends to the list is waited for."""
        began = time.perf_counter()
        results: list[object] = []
        yield results
        jax.block_until_ready(results)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def peek(self) -> dict[str, float]:
        """Seconds of every phase so far."""
        return dict(self._seconds)

    def elapsed(self) -> float:
        """Seconds since the last `take`, phases and all else."""
        return time.perf_counter() - self._started

    def take(self) -> dict[str, float]:
        """`timing_s/<phase>`, `timing_s/step` (all of it) and `timing_s/other`; starts anew."""
        now = time.perf_counter()
        total = now - self._started
        times = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        times["timing_s/other"] = total - sum(self._seconds.values())
        times["timing_s/step"] = total
        self._seconds, self._started = {}, now
        return times


def peak_memory() -> dict[str, float]:
    """`perf/peak_memory_gib`: the most that one of this process's devices has held so far; nothing
    where devices do not say (a CPU).
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"perf/peak_memory_gib": max(peaks) / 2**30} if peaks else {}


def deepspeed_flops(cfg: ModelConfig, rows: int, length: int, passes: int) -> float:
    """Floating-point operations by DeepSpeed-Chat's formula (dschat/utils/perf.py).

    24 c B s l h^2 (1 + s/(6h) + V/(16 l h)); `passes` c is 1 for a forward pass, 3 for a train
    step, 4 with rematerialisation. It knows no gated feed-forward and no grouped heads.
    """
    h, layers = cfg.width, cfg.num_layers
    shape = 1 + length / (6 * h) + cfg.vocab_size / (16 * layers * h)
    return 24 * passes * rows * length * layers * h**2 * shape
