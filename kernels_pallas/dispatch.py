"""Which implementation of an operation runs: one rule for every kernel folder.

Names: "reference" (plain JAX, every platform), "pallas" (Triton backend, NVIDIA GPU),
"interpret" (the same kernel run by the interpreter, for tests), "cudnn" (attention only),
"chunked" (token_logprob only). Without a name the first supported one of the platform is taken.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

logger = logging.getLogger(__name__)


class Unsupported(ValueError):  # noqa: N818 (reads as what it says)
    """An implementation was asked for by name and cannot run these arguments here."""


@dataclass(frozen=True)
class Implementation:
    """`run(*arrays, **options)`, and `why_not` of the same: a reason, or None if it runs."""

    run: Callable[..., Any]
    why_not: Callable[..., str | None]


def always(*arrays: jax.Array, **options: Any) -> None:
    """The `why_not` of an implementation that runs everywhere."""
    del arrays, options


def kernel_table(
    kernel: Callable[..., Any],
    why_not: Callable[..., str | None],
    why_not_interpret: Callable[..., str | None],
    reference: Callable[..., Any],
) -> dict[str, Implementation]:
    """The implementations of an operation with one kernel, which takes `interpret`."""
    interpreted = functools.partial(kernel, interpret=True)
    return {
        "pallas": Implementation(kernel, why_not),
        "interpret": Implementation(interpreted, why_not_interpret),
        "reference": Implementation(reference, always),
    }


def target_platform() -> str:
    """Platform being compiled for ("cpu", "gpu"): the mesh in context, else the default backend.

    The mesh comes first because programs are also compiled for GPUs that are not attached.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def why_not_gpu() -> str | None:
    """Reason why a GPU kernel cannot run here, or None."""
    platform = target_platform()
    if platform == "gpu":
        return None
    return f"it needs an NVIDIA GPU and the platform is {platform!r}"


def run(
    op: str,
    table: Mapping[str, Implementation],
    gpu_order: Sequence[str],
    implementation: str | None,
    *arrays: jax.Array | None,
    **options: Any,
) -> Any:
    """Calls the chosen implementation of `op`.

    Args:
      op: its name in messages.
      table: name to implementation.
      gpu_order: names tried in this order on a GPU; elsewhere only the last of them.
      implementation: a name of the table, or None to choose.
      *arrays: passed on.
      **options: passed on.

    Raises:
      Unsupported: the named implementation cannot run, with its reason.
      ValueError: there is no such name.
    """
    if implementation is not None:
        chosen = _named(op, table, implementation, arrays, options)
    else:
        chosen = _first_supported(op, table, gpu_order, arrays, options)
    return table[chosen].run(*arrays, **options)


def _named(
    op: str, table: Mapping[str, Implementation], name: str, arrays: Any, options: Any
) -> str:
    if name not in table:
        raise ValueError(
            f"{op}: implementation={name!r} does not exist: use one of {sorted(table)}, or None"
        )
    reason = table[name].why_not(*arrays, **options)
    if reason is not None:
        raise Unsupported(
            f"{op}: implementation={name!r} cannot run: {reason}; "
            f"use implementation='reference', or None to choose automatically"
        )
    return name


def _first_supported(
    op: str,
    table: Mapping[str, Implementation],
    gpu_order: Sequence[str],
    arrays: Any,
    options: Any,
) -> str:
    if target_platform() != "gpu":
        return gpu_order[-1]
    for name in gpu_order:
        reason = table[name].why_not(*arrays, **options)
        if reason is None:
            return name
        _log_passed_over(op, name, reason)
    raise Unsupported(f"{op}: none of {list(gpu_order)} can run")


@functools.cache
def _log_passed_over(op: str, name: str, reason: str) -> None:
    """Says once a process that a slower implementation runs, and why."""
    logger.warning("%s: %s is passed over: %s", op, name, reason)
