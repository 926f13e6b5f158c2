"""How many rows can be answered at once in the device memory that is free."""

import logging

import jax
import numpy as np

from meshes.multihost import from_first_process
from rlhf_jax.engine.memory import ModelMemory, Rows

log = logging.getLogger(__name__)
GIB = 2**30


def free_bytes() -> int | None:
    """What the fullest device of this process may still use; None where devices do not say (a
    CPU).
    """
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        free.append(stats["bytes_limit"] - stats["bytes_in_use"])
    return min(free)


def rows_that_fit(model: ModelMemory, asked: Rows) -> int:
    """`asked.rows`, or half as many (rounded up to a share for each device) as often as it takes
    until keys and values fit beside what the devices hold; a line in the log says so. All processes
    get the same number.

    Raises:
        ValueError: not even one row a share of the batch fits.
    """
    free = free_bytes()
    if free is None:
        return asked.rows
    room = float(from_first_process(lambda: np.array([free / GIB], np.float32), (1,))[0])

    def need(rows: int) -> float:
        return model.generating(Rows(rows, asked.length, asked.counted)) / GIB

    rows, shares = asked.rows, model.rollout.batch_size_divisor
    while need(rows) > room:
        fewer = -(-rows // (2 * shares)) * shares
        if fewer == rows:
            raise ValueError(
                f"answers of {asked.counted} tokens to prompts of {asked.length - asked.counted} "
                f"need about {need(rows):.2f} GiB on each device for {rows} rows, {room:.2f} are "
                "free: shorten them, use a larger mesh, or drop a model"
            )
        rows = fewer
    if rows < asked.rows:
        log.warning(
            "%d rows at once need about %.2f GiB on each device, %.2f are free: %d are answered at "
            "once", asked.rows, need(asked.rows), room, rows,
        )  # fmt: skip
    return rows
