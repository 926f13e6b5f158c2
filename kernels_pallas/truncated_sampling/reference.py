"""The plain form: the search of all rows in one loop, every pass over whole rows. Any platform."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.truncated_sampling import search
from kernels_pallas.truncated_sampling.noise import gumbel
from kernels_pallas.truncated_sampling.search import Pass, Rule


def truncated_sampling(
    logits_BV: jax.Array, keys_B2: jax.Array, *, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """See api.truncated_sampling."""
    token_V = jnp.arange(logits_BV.shape[1])
    scores_BV = logits_BV + gumbel(keys_B2[:, :1], keys_B2[:, 1:], token_V[None])
    log_sums_B = jax.nn.logsumexp(logits_BV, axis=-1)
    largest_B = logits_BV.max(-1)
    floor_B = search.floor_of(largest_B, rule)

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
            above_BV.sum(-1), mass(above_BV), from_BV.sum(-1), mass(from_BV),
            jnp.exp(pivot_B - log_sums_B), token_B, logit_B,
        )  # fmt: skip

    if not (rule.counts or rule.weighs):  # all that is left out is below one logit
        token_B, logit_B = best(jnp.where(logits_BV >= floor_B[:, None], scores_BV, -jnp.inf))
        return token_B, logit_B - log_sums_B
    token_B, logit_B = best(scores_BV)
    guess_B = jnp.full_like(logit_B, -jnp.inf)
    state = search.begin(token_B, logit_B, guess_B, largest_B, rule, floor_B)

    def step(state: search.State) -> search.State:
        new = search.advance(state, look(state.pivot), rule, floor_B)
        return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, new)

    state = lax.while_loop(lambda state: ~state.done.all(), step, state)
    return state.token, state.logit - log_sums_B
