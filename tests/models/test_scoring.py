"""Windows, log-probabilities and scores against NumPy."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import (
    ScalarModel,
    abstract_params,
    compute_layout,
    param_specs,
    store_layout,
)
from rlhf_jax.models.remat import Remat
from rlhf_jax.models.scoring import scalar_scores, score_tokens, take_window
from tests.meshes.compiled import collectives, reduced
from tests.models.cases import LLAMA, OPT, put_params, random_values

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_a_window_starts_where_its_row_says_and_repeats_the_last_position(mesh):
    layout = compute_layout(OPT, make_mesh(parse_mesh(mesh), 2 if mesh == "4x2" else 1))
    flat, deep = RNG.integers(0, 99, (8, 6)), RNG.normal(size=(8, 6, 3)).astype(np.float32)
    start = np.array([0, 1, 2, 3, 4, 5, 3, 0], np.int32)
    index = np.minimum(start[:, None] + np.arange(4), 5)
    take = jax.jit(partial(take_window, length=4, layout=layout))
    with jax.set_mesh(layout.mesh):
        for array in (flat, deep):
            got = take(*put_batch((array, start), layout))
            np.testing.assert_array_equal(got, array[np.arange(8)[:, None], index])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("cfg", [OPT, LLAMA], ids=["tied", "untied"])
def test_log_probabilities_and_entropies_are_those_of_the_real_vocabulary(
    cfg, temperature, tolerance
):
    """Padded columns have probability 0 even where their rows of the table are not zero."""
    cfg = replace(cfg, num_layers=0)
    layout = compute_layout(cfg, make_mesh(parse_mesh("4x2"), 2))
    values = random_values(param_specs(cfg), seed=1)
    table = values.embed_VW if values.unembed_VW is None else values.unembed_VW
    table[cfg.vocab_size :] = 1.0
    hidden = RNG.normal(size=(4, 3, cfg.width)).astype(np.float32)
    targets = RNG.integers(0, cfg.vocab_size, (4, 3)).astype(np.int32)
    with jax.set_mesh(layout.mesh):
        params = put_params(values, param_specs(cfg), layout)
        score = jax.jit(partial(score_tokens, cfg=cfg, layout=layout, temperature=temperature))
        rows = put_batch((hidden, targets), layout)
        logprobs, entropies = score(params, *rows)
        logits = jax.jit(partial(logits_from_hidden, cfg=cfg))(params, rows[0])
    real = hidden.astype(np.float64) @ table[: cfg.vocab_size].T.astype(np.float64)
    expected = log_softmax(real / temperature)
    chosen = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, chosen, **tolerance(np.float32))
    np.testing.assert_allclose(
        entropies, -(np.exp(expected) * expected).sum(-1), **tolerance(np.float32)
    )
    logits = np.asarray(logits)
    np.testing.assert_allclose(logits[..., : cfg.vocab_size], real, **tolerance(np.float32))
    assert (logits[..., cfg.vocab_size :] == -np.inf).all()


def true_gradients(
    hidden: np.ndarray, table: np.ndarray, targets: np.ndarray, weights: np.ndarray, real: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the weighted sum of log-probabilities and entropies, by d log p / dz = onehot - p and
    d entropy / dz = -p (log p + entropy), one row at a time: for hidden and the table.
    """
    to_hidden, to_table = np.zeros_like(hidden), np.zeros_like(table)
    for place in np.ndindex(targets.shape):
        logp = log_softmax(table[:real] @ hidden[place])
        p = np.exp(logp)
        chosen, spread = weights[:, *place]
        to_logits = -chosen * p - spread * p * (logp - p @ logp)
        to_logits[targets[place]] += chosen
        to_hidden[place] = to_logits @ table[:real]
        to_table[:real] += np.outer(to_logits, hidden[place])
    return to_hidden, to_table


def gradient_program(mesh: str, remat: Remat, dtype: Any) -> tuple[Any, Any]:
    """The gradient of a weighted sum of log-probabilities and entropies, and its layout."""
    layout = compute_layout(BARE, make_mesh(parse_mesh(mesh), int(mesh.split("x")[1])))
    store = store_layout(BARE, layout.mesh)

    def loss(params, hidden, targets, weights):
        found = score_tokens(params, hidden, targets, BARE, layout, remat=remat)
        return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True))

    return jax.jit(jax.grad(loss, argnums=(0, 1))), (layout, store, dtype)


BARE = replace(OPT, num_layers=0, final_norm=False)
ROWS = (8, 3)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("mesh", ["1x1", "4x2", "1x8"])
def test_gradients_are_those_of_the_whole_vocabulary(mesh, remat, dtype, tolerance):
    """Each tensor-parallel device has the logits of its own part of it."""
    values = random_values(param_specs(BARE), seed=2)
    hidden = RNG.normal(size=(*ROWS, BARE.width)).astype(dtype).astype(np.float32)
    targets = RNG.integers(0, BARE.vocab_size, ROWS).astype(np.int32)
    weights = RNG.normal(size=(2, *ROWS)).astype(np.float32)
    gradient, (layout, store, _) = gradient_program(mesh, remat, dtype)
    with jax.set_mesh(layout.mesh):
        params = put_params(values, param_specs(BARE), store, dtype)
        table = np.asarray(params.embed_VW).astype(np.float32)
        rows = put_batch((hidden.astype(dtype), targets, *weights), layout)
        of_params, of_hidden = gradient(params, *rows[:2], rows[2:])
    expected = true_gradients(hidden, table, targets, weights, BARE.vocab_size)
    found = (of_hidden, of_params.embed_VW)
    allowed: Any = tolerance(np.float32) if dtype == np.float32 else {"rtol": 0.03, "atol": 0.03}
    for one, truth in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one).astype(np.float32), truth, **allowed)


def test_tensor_parallel_devices_share_sums_and_neither_logits_nor_weights():
    """On 1x8 nothing is gathered, and the largest sum is the gradient of the hidden states."""
    gradient, (layout, store, _) = gradient_program("1x8", "full", np.float32)
    with jax.set_mesh(layout.mesh):
        params = abstract_params(param_specs(BARE), store, jnp.dtype("float32"))
        rows = jax.ShapeDtypeStruct(ROWS, jnp.int32, sharding=layout.sharding("batch", None))
        floats = rows.update(dtype=jnp.float32)
        hidden = jax.ShapeDtypeStruct(
            (*ROWS, BARE.width), jnp.float32, sharding=layout.sharding("batch", None, None)
        )
        program = gradient.lower(params, hidden, rows, (floats, floats)).compile()
    assert set(collectives(program)) == {"all-reduce"}
    # Each device's own rows of the table are "summed" over the mesh axes that have one device.
    rows_of_one = BARE.padded_vocab // 8
    num_rows, width = ROWS[0] * ROWS[1], BARE.width
    allowed = [(num_rows,), (*ROWS, width), (rows_of_one, width)]
    assert reduced(program) <= {f"f32[{','.join(map(str, shape))}]" for shape in allowed}


def test_scalar_scores_are_float32_products_with_the_head(tolerance):
    hidden, head = RNG.normal(size=(2, 3, 8)), RNG.normal(size=8)
    wide = scalar_scores(ScalarModel(None, jnp.float32(head)), jnp.float32(hidden))  # pyright: ignore
    np.testing.assert_allclose(wide, hidden @ head, **tolerance(np.float32))
    narrow = scalar_scores(ScalarModel(None, jnp.bfloat16(head)), jnp.bfloat16(hidden))  # pyright: ignore
    assert narrow.dtype == jnp.float32
