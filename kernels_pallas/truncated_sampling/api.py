"""A sample of what top-k, top-p and min-p keep, without a sort."""

import jax

from kernels_pallas import dispatch
from kernels_pallas.truncated_sampling import pallas, reference
from kernels_pallas.truncated_sampling.search import Rule

IMPLEMENTATIONS = dispatch.kernel_table(
    pallas.truncated_sampling,
    pallas.why_not,
    pallas.why_not_interpret,
    reference.truncated_sampling,
)
GPU_ORDER = ("pallas", "reference")


def truncated_sampling(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The kept token with the largest logit + Gumbel noise, and its log-softmax over all tokens.

    So the token is a sample of the softmax over what is kept. Kept is a token z with fewer than
    `top_k` logits above its own, whose larger logits together have less than the share `top_p` of
    the mass that top-k keeps, and that has at least `min_p` times the largest probability. So
    tokens of equal logits are kept or left out together, beyond the k-th if need be, and the
    likeliest is always kept. Of equal sums the first token wins. A row with NaN gives any of its
    tokens, and NaN.

    Args:
      logits_BV: float32, divided by the temperature; -inf is never drawn beside a finite one.
      keys_B2: uint32, `jax.random.key_data` of a key for each row. The noise is that of
        `jax.random.gumbel(key, (V,))`.
      top_k: positive, or 0 for all.
      top_p: in (0, 1], 1 for all.
      min_p: in [0, 1], 0 for all.
      implementation: "pallas" | "interpret" | "reference"; None takes the kernel on a GPU.

    Returns:
      (token_B int32, logprob_B float32).

    Raises:
      ValueError: shapes, dtypes or settings do not fit together.
      dispatch.Unsupported: the named implementation cannot run, with its reason.
    """
    if logits_BV.ndim != 2 or 0 in logits_BV.shape or keys_B2.shape != (logits_BV.shape[0], 2):
        raise ValueError(
            f"truncated_sampling: got logits {logits_BV.shape} and keys {keys_B2.shape}; "
            f"expected [B,V], not empty, and [B,2]"
        )
    for name, array, dtype in (("logits", logits_BV, "float32"), ("keys", keys_B2, "uint32")):
        if array.dtype != dtype:
            raise ValueError(f"truncated_sampling: {name} are {array.dtype}; expected {dtype}")
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"truncated_sampling: top_k={top_k}, top_p={top_p}, min_p={min_p}; use top_k of at "
            f"least 0, top_p in (0, 1] and min_p in [0, 1]"
        )
    rule = Rule(top_k if top_k < logits_BV.shape[1] else 0, top_p, min_p)
    if implementation is None and not (rule.counts or rule.weighs):
        return reference.truncated_sampling(logits_BV, keys_B2, rule=rule)  # a mask: no search
    return dispatch.run(
        "truncated_sampling",
        IMPLEMENTATIONS,
        GPU_ORDER,
        implementation,
        logits_BV,
        keys_B2,
        rule=rule,
    )
