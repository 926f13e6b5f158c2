"""RLHF in JAX: one engine that trains and generates. See `load` and `PPO`; whole runs are
`rlhf_jax.train`.

Names are imported when they are first used: `import rlhf_jax` is fast and touches no device.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

if TYPE_CHECKING:
    from rlhf_jax.inference.ppo import PPO
    from rlhf_jax.inference.session import Generation, Model, load
    from rlhf_jax.stages.ppo_config import PPOConfig

__all__ = ["load", "Model", "Generation", "PPO", "PPOConfig"]

HOMES = {"PPO": "rlhf_jax.inference.ppo", "PPOConfig": "rlhf_jax.stages.ppo_config"}
"""Where names are defined; the others in `rlhf_jax.inference.session`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(HOMES.get(name, "rlhf_jax.inference.session")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
