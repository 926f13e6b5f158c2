"""Processes and devices: starting them, and bringing arrays of several processes to each host."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshes.layout import MeshShape, check_device_count, parse_mesh

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
FAREWELL = 10.0
"""Seconds that a process which has failed has to end together with the others."""
DEVICE_FILES = Path("/dev")
"""Here are the GPUs that this process was given; /proc also has those that a container was not."""
NO_GPUS = ("", "-1", "NoDevFiles")
"""CUDA_VISIBLE_DEVICES of a process that must not have one; the last is SLURM's."""


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


@contextmanager
def ending_alone() -> Iterator[None]:
    """One of several processes that fails inside ends within `FAREWELL`, whatever the others do:
    they may wait for it, and JAX would have it wait minutes for them.
    """
    try:
        yield
    except Exception:
        if jax.distributed.is_initialized():
            timer = threading.Timer(FAREWELL, os._exit, [1])
            timer.daemon = True
            timer.start()
        raise


def num_processes() -> int:
    """How many processes were announced; touches no device."""
    return int(os.environ.get("JAX_NUM_PROCESSES", "1")) if COORDINATOR in os.environ else 1


def simulate_cpu_devices(count: int) -> None:
    """Lets this process's CPU appear as several devices; GPUs are not affected.

    Does nothing once JAX has started its devices (in a notebook, in tests).
    """
    # XLA's thread pool has as many threads as cores; the all-reduces of independent gradients
    # fill it, wait for each other and stop the process. NPROC is how XLA is told of more.
    os.environ.setdefault("NPROC", str(16 * count))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return


def default_mesh_shape() -> MeshShape:
    """All visible devices, fully sharded."""
    return MeshShape(1, len(jax.devices()), 1)


def check_platform() -> None:
    """Starts JAX's devices. On a host with NVIDIA GPUs the CPU must have been chosen: by
    JAX_PLATFORMS, or by a CUDA_VISIBLE_DEVICES that hides them.

    Raises:
        ValueError: JAX has only the CPU, or cannot start what was chosen.
    """
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot start its devices: {error}") from error
    gpus = sorted(path.name for path in DEVICE_FILES.glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    chosen = jax.config.jax_platforms or jax.config.read("jax_platform_name")
    if backend != "cpu" or not gpus or chosen or visible.strip() in NO_GPUS:
        return
    names = [each.name for each in entry_points(group="jax_plugins") if "cuda" in each.name]
    plugin = f"its error with {' and '.join(names)} is above" if names else "no CUDA plugin"
    raise ValueError(
        f"this host has NVIDIA GPUs ({', '.join(gpus)}; visible: {visible}), but JAX found only "
        f"the CPU (jaxlib {version('jaxlib')}, {plugin}): install what fits the driver, pip "
        "install 'rlhf-jax[cuda13]' (580 or newer) or 'rlhf-jax[cuda12]' (525 or newer), or set "
        "JAX_PLATFORMS=cpu to use the CPU"
    )


def start_devices(mesh: str | None, *, cpu_devices: int = 1) -> MeshShape:
    """Joins the other processes and starts the devices that `mesh` (`"4x2"`) asks for.

    On a CPU they are simulated, unless JAX has started before. Without a mesh: every visible
    device, fully sharded; `cpu_devices` is how many a CPU then simulates.

    Raises:
        ValueError: no mesh, or one with more devices than are visible; or JAX does not use the
            host's GPUs, and nobody asked for the CPU.
    """
    asked = parse_mesh(mesh) if mesh is not None else None
    wanted = asked.num_devices if asked else cpu_devices
    if wanted > num_processes():
        simulate_cpu_devices(wanted // num_processes())
    start_processes()
    check_platform()
    shape = asked or default_mesh_shape()
    check_device_count(shape, len(jax.devices()))
    check_processes_share(shape)
    return shape


def check_processes_share(shape: MeshShape) -> None:
    """ValueError where the mesh, of the first devices, leaves a process without one: it would have
    no part of any array.
    """
    found = jax.devices()
    used = {device.process_index for device in found[: shape.num_devices]}
    if len(used) < jax.process_count():
        raise ValueError(
            f"--mesh={shape} asks for {shape.num_devices} of the {len(found)} devices of "
            f"{jax.process_count()} processes, and {jax.process_count() - len(used)} of these "
            f"would have none: use --mesh={len(found)}x1, or start {len(used)} "
            f"process{'es' * (len(used) > 1)}"
        )


def to_host(tree: Any) -> Any:
    """Whole arrays as NumPy on every process."""

    def fetch(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(fetch, tree)


def on_first_process(action: Callable[[], None]) -> None:
    """`action` on the first process, while the others wait for it.

    Where it fails the others exit in silence with code 1: the first one tells the reason.
    """
    if jax.process_count() == 1:
        action()
        return
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except (ValueError, OSError) as error:
            failure = error
    if any_process(failure is not None):
        raise failure or SystemExit(1)


def from_first_process(make: Callable[[], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """On every process, the float32 array of `shape` that `make` returns on the first.

    Errors end as in `on_first_process`.
    """
    made = np.zeros(shape, np.float32)

    def fill() -> None:
        made[...] = make()

    on_first_process(fill)
    if jax.process_count() == 1:
        return made
    return np.asarray(multihost_utils.broadcast_one_to_all(made))


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process; all of them must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())
