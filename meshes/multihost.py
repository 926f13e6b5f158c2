"""Processes and devices: starting them, and bringing arrays of several processes to each host."""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshes.layout import MeshShape

COORDINATOR = "JAX_COORDINATOR_ADDRESS"


def start_processes() -> None:
    """Joins the other processes of a job, where there are any.

    They are announced by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or by
    SLURM (more than one task). Call it before anything touches a device.
    """
    if jax.distributed.is_initialized():
        return
    if COORDINATOR in os.environ:
        jax.distributed.initialize(
            os.environ[COORDINATOR],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
        )
    elif int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


def num_processes() -> int:
    """How many processes were announced; touches no device."""
    return int(os.environ.get("JAX_NUM_PROCESSES", "1")) if COORDINATOR in os.environ else 1


def simulate_cpu_devices(count: int) -> None:
    """Lets this process's CPU appear as several devices; GPUs are not affected.

    Does nothing once JAX has started its devices (in a notebook, in tests).
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return


def default_mesh_shape() -> MeshShape:
    """All visible devices, fully sharded."""
    return MeshShape(1, len(jax.devices()), 1)


def to_host(tree: Any) -> Any:
    """Whole arrays as NumPy on every process."""

    def fetch(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(fetch, tree)
