"""What the backward pass of a layer computes anew, and what it is given for that.

| remat | computed anew | kept of a layer beside its input |
|---|---|---|
| full | everything | nothing |
| matrices | norms, activations and all products with matrices | attention's result |
| mlp | norms, activations and the feed-forward | the above, qkv, the sum before the feed-forward |
| dots | norms and activations | the above and the products of the feed-forward |
| none | nothing | whatever the backward pass reads |

A byte of any product with a matrix saves about as much time as one of another (2 D^2 FLOPs a token
for D numbers); one of attention's result saves more, since attention runs further from the
device's matrix rate.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.attention.pallas import KEPT as KERNEL

Remat = Literal["auto", "none", "dots", "mlp", "matrices", "full"]
"""`auto` becomes one of the others before a program is made: see `stages/fit_remat.py`."""

KEPT = {
    "matrices": (KERNEL, "attended"),
    "mlp": (KERNEL, "attended", "qkv", "middle"),
    "dots": (KERNEL, "attended", "qkv", "middle", "up", "gate", "end"),
}
"""Names of arrays that a policy keeps where the backward pass reads them."""
ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's primitive for cuDNN's forward pass: its results have no names."""


def keeps_products(remat: Remat) -> bool:
    """Whether no product with a matrix is computed anew."""
    return remat in ("none", "dots")


def repeats_layers(remat: Remat) -> bool:
    """Whether most of a layer is computed anew, as with DeepSpeed's gradient checkpointing."""
    return remat in ("matrices", "full")


def keep(array: jax.Array, name: str) -> jax.Array:
    """The array under a name of `KEPT`."""
    return checkpoint_name(array, name)


def rematerialised(run: Callable[..., Any], remat: Remat, static_argnums: tuple[int, ...]) -> Any:
    """`run`, whose backward pass computes anew what `remat` says."""
    if remat == "auto":
        raise ValueError("remat=auto is for runs, whose memory plan chooses: name a policy here")
    if remat == "none":
        return run
    policy = None if remat == "full" else keeping(KEPT[remat])
    return jax.checkpoint(run, policy=policy, static_argnums=static_argnums)


def keeping(names: tuple[str, ...]) -> Callable[..., Any]:
    """Keeps what has these names, and what cuDNN's backward pass reads of its forward pass."""
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name == ATTENTION or named(primitive, *args, **params)

    return policy
