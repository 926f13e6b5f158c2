"""The sampling kernels. Pallas, Triton backend."""

import jax

from kernels_pallas import dispatch
from kernels_pallas.truncated_sampling import shortlist, whole
from kernels_pallas.truncated_sampling.search import Rule


def why_not(logits_BV: jax.Array, keys_B2: jax.Array, *, rule: Rule) -> str | None:
    """Reason why the compiled kernels do not take these arguments, or None."""
    return dispatch.why_not_gpu() or why_not_interpret(logits_BV, keys_B2, rule=rule)


def why_not_interpret(logits_BV: jax.Array, keys_B2: jax.Array, *, rule: Rule) -> str | None:
    """The limits that do not depend on the platform."""
    del keys_B2, rule
    if logits_BV.size >= 2**31:
        return f"offsets are 32 bits wide and the logits {logits_BV.shape} have 2^31 or more"
    return None


def truncated_sampling(
    logits_BV: jax.Array, keys_B2: jax.Array, *, rule: Rule, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See api.truncated_sampling."""
    kernel = shortlist if 0 < rule.top_k <= shortlist.LONGEST else whole
    return kernel.sample(logits_BV, keys_B2, rule=rule, interpret=interpret)
