"""Time by phase, and memory as the devices tell it."""

import time
from typing import Any

import jax
import pytest

from rlhf_jax.runtime.profile import PhaseTimer, peak_memory


class Device:
    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


@pytest.mark.parametrize(
    ("stats", "told"),
    [
        ([{"peak_bytes_in_use": 2**30}, {"peak_bytes_in_use": 3 * 2**30}], 3.0),
        ([{"bytes_limit": 7}, None], None),
    ],
)
def test_the_fullest_device_tells_its_memory(
    stats: list[Any], told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(each) for each in stats])
    assert peak_memory() == ({} if told is None else {"perf/peak_memory_gib": told})


def test_phases_and_all_else_make_up_the_step() -> None:
    timer = PhaseTimer()
    for name in ("generate", "update", "generate"):
        with timer.phase(name):
            time.sleep(0.01)
    found = timer.take()
    step = found.pop("timing_s/step")
    assert sum(found.values()) == pytest.approx(step)
    assert found["timing_s/generate"] > 0.019  # a sleep may last longer, and is never shorter
    assert found["timing_s/update"] > 0.009
    assert timer.peek() == {}
