"""How often the model runs to answer prompts of given answer lengths, counted on the host."""

from dataclasses import dataclass

import numpy as np

from rlhf_jax.engine.slots import group_size


@dataclass(frozen=True)
class Passes:
    """`prefills` read a group of prompts each, `steps` decode a token in every busy row.

    `busy` is the share of rows that a decode step found at work.
    """

    prefills: int
    steps: int
    busy: float


def passes_in_waves(lengths_N: np.ndarray, rows: int) -> Passes:
    """`engine.generate` for batch after batch: every one waits for its longest answer."""
    waves = [lengths_N[start : start + rows] for start in range(0, len(lengths_N), rows)]
    steps = sum(max(int(wave.max()) - 1, 0) for wave in waves)
    return Passes(len(waves), steps, _busy(lengths_N, steps, rows))


def passes_in_slots(lengths_N: np.ndarray, num_slots: int, num_shares: int = 1) -> Passes:
    """`engine.slots`: a prompt of length 0 is a filler and takes none."""
    size = group_size(num_slots, num_shares) // num_shares
    waiting = [list(share[share > 0]) for share in np.split(lengths_N, num_shares)]
    left = np.zeros((num_shares, num_slots // num_shares), int)
    prefills = steps = 0
    while any(waiting):
        prefills += 1
        for row, queue in zip(left, waiting, strict=True):
            for slot in np.flatnonzero(row == 0)[: min(size, len(queue))]:
                row[slot] = queue.pop(0) - 1  # prefill gives the first token
        while left.any() and not _can_fill(left, waiting, size):
            left = np.maximum(left - 1, 0)
            steps += 1
    return Passes(prefills, steps, _busy(lengths_N, steps, num_slots))


def _can_fill(left: np.ndarray, waiting: list[list[int]], size: int) -> bool:
    counts = [len(queue) for queue in waiting]
    room = sum(min((row == 0).sum(), n) for row, n in zip(left, counts, strict=True))
    return any(counts) and room >= sum(min(size, n) for n in counts)


def _busy(lengths: np.ndarray, steps: int, rows: int) -> float:
    decoded = np.maximum(lengths - 1, 0).sum()
    return float(decoded / max(steps * rows, 1))
