"""RLHF in JAX: one engine that trains and generates. See `load`; training is `rlhf_jax.train`.

Names are imported when they are first used: `import rlhf_jax` is fast and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_jax.inference.session import Generation, Model, load

__all__ = ["load", "Model", "Generation"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rlhf_jax.inference.session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
