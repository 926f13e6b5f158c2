"""Where models that do not train live, and in which dtype."""

import jax.numpy as jnp

from meshes.layout import Layout
from meshes.offload import on_host
from rlhf_jax.stages.run import Run


def frozen_layout(store: Layout, offload: bool) -> Layout:
    """`store`, in host memory where that was asked for."""
    return on_host(store) if offload else store


def frozen_dtype(run: Run, asked: str | None) -> jnp.dtype:
    """What was asked for, or that of the models that train."""
    return run.dtype if asked is None else jnp.dtype(asked)
