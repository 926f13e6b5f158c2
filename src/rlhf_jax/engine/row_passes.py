"""What models say about whole rows of tokens: forward passes of scoring and of losses."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshes.layout import Layout
from meshes.reshard import local_shards
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import Remat, forward
from rlhf_jax.models.packed_rows import Places, answers_first, answers_in_rows, pack_rows
from rlhf_jax.models.params import Params, ScalarModel
from rlhf_jax.models.scoring import scalar_scores, score_tokens, take_window


@dataclass(frozen=True)
class ModelOnMesh:
    """A model's config and the layout that its forward passes run in."""

    cfg: ModelConfig
    layout: Layout


def join_rows(
    prompts_BP: jax.Array, prompt_lengths_B: jax.Array, answers_BR: jax.Array, layout: Layout
) -> jax.Array:
    """Prompt and answer in one row, `[B, P + R]`, right-padded with 0."""

    def local(prompts: jax.Array, lengths: jax.Array, answers: jax.Array) -> jax.Array:
        rows = jnp.pad(prompts, ((0, 0), (0, answers.shape[1])))
        return jax.vmap(lambda row, n, answer: jax.lax.dynamic_update_slice(row, answer, (n,)))(
            rows, lengths, answers
        )

    rows = ("batch", None)
    run = local_shards(local, layout, in_axes=(rows, ("batch",), rows), out_axes=rows)
    return run(prompts_BP, prompt_lengths_B, answers_BR)


def hidden_states(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    place: ModelOnMesh,
    remat: Remat,
    places: Places | None,
) -> jax.Array:
    """Of every row, `[B, T, W]`, or of the sequences that hold them where they have `places`."""
    starts = None
    if places is not None:
        tokens_BT, starts = pack_rows(tokens_BT, places, place.layout)
    return forward(params, tokens_BT, place.cfg, place.layout, starts_BT=starts, remat=remat)


def answer_logprobs(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    prompt_lengths_B: jax.Array,
    num_answer: int,
    model: ModelOnMesh,
    temperature: float,
    remat: Remat = "none",
    places: Places | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log p of every answer token and the entropy there, `[B, R]`: no logits elsewhere; where rows
    have `places`, none behind an answer's end either, where 0 stands.
    """
    hidden = hidden_states(params, tokens_BT, model, remat, places)
    targets = take_window(tokens_BT, prompt_lengths_B, num_answer, model.layout)
    score = partial(
        score_tokens, params, cfg=model.cfg, layout=model.layout,
        temperature=temperature, remat=remat,
    )  # fmt: skip
    if places is None:
        return score(take_window(hidden, prompt_lengths_B - 1, num_answer, model.layout), targets)
    where = prompt_lengths_B, places, model.layout
    hidden, targets, counts = answers_first(hidden, targets, *where)
    logprobs, entropies = score(hidden, targets, counts_B=counts)
    return answers_in_rows(logprobs, *where), answers_in_rows(entropies, *where)


def row_scores(
    model: ScalarModel[jax.Array],
    tokens_BT: jax.Array,
    place: ModelOnMesh,
    remat: Remat = "none",
    places: Places | None = None,
) -> jax.Array:
    """The scalar head's value at every position, `[B, T]`; of the sequences where there are any."""
    return scalar_scores(model, hidden_states(model.body, tokens_BT, place, remat, places))


def answer_values(
    critic: ScalarModel[jax.Array],
    tokens_BT: jax.Array,
    prompt_lengths_B: jax.Array,
    num_answer: int,
    place: ModelOnMesh,
    remat: Remat = "none",
    places: Places | None = None,
) -> jax.Array:
    """The critic's value before every answer token, `[B, R]`."""
    values = row_scores(critic, tokens_BT, place, remat, places)
    return take_window(values, prompt_lengths_B - 1, num_answer, place.layout, places)
