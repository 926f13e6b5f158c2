"""What XLA knows of this machine's GPU: the description that others compile for it with.

python scripts/dump_gpu_target.py > tests/kernels/h200_target_config.txtpb

Programs compiled with it are those of this GPU, driver and cuDNN aside.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]


def describe(devices: Sequence[Any]) -> str:
    """The `GpuTargetConfigProto` of the devices, as text."""
    topology: Any = xla_client.get_topology_for_devices(list(devices))
    return topology.target_config


def main() -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"this machine has no GPU that JAX sees, only {device.device_kind}")
    print(describe([device]), end="")


if __name__ == "__main__":
    main()
