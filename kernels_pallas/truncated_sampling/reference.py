"""The plain form: the search of all rows in one loop, every pass over whole rows. Any platform."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.search import Pass, Rule


def truncated_sampling(
    logits_BV: jax.Array, noise_BV: jax.Array, *, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """See api.truncated_sampling."""
    scores_BV = logits_BV + noise_BV
    log_sums_B = jax.nn.logsumexp(logits_BV, axis=-1)
    floor_B = jnp.full_like(log_sums_B, -jnp.inf)
    if rule.min_p > 0:
        floor_B = logits_BV.max(-1) + math.log(rule.min_p)

    def best(scores_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_B = jnp.argmax(scores_BV, -1).astype(jnp.int32)
        return token_B, jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]

    def look(pivot_B: jax.Array) -> Pass:
        above_BV, from_BV = logits_BV > pivot_B[:, None], logits_BV >= pivot_B[:, None]
        weights_BV = jnp.exp(logits_BV - log_sums_B[:, None])

        def mass(where_BV: jax.Array) -> jax.Array:
            return jnp.where(where_BV, weights_BV, 0).sum(-1)

        token_B, logit_B = best(
            jnp.where(above_BV & (logits_BV >= floor_B[:, None]), scores_BV, -jnp.inf)
        )
        return Pass(
            above_BV.sum(-1), mass(above_BV), from_BV.sum(-1), mass(from_BV), token_B, logit_B
        )

    token_B, logit_B = best(scores_BV)
    state = search.begin(token_B, logit_B, jnp.full_like(logit_B, -jnp.inf), rule, floor_B)

    def step(state: search.State) -> search.State:
        new = search.advance(state, look(state.pivot), rule, floor_B)
        return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, new)

    state = lax.while_loop(lambda state: ~state.done.all(), step, state)
    return state.token, state.logit - log_sums_B
