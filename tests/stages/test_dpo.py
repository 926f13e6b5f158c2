"""The answers' log-probabilities of a batch of pairs, against one row at a time in NumPy."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.batches import collate_pairs
from rlhf_jax.data.tokenize import PairRow
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import compute_layout, param_specs, store_layout
from rlhf_jax.stages import answers
from rlhf_jax.stages.answers import prompts_of
from rlhf_jax.stages.dpo import longest_answer, pair_logprobs
from tests.models.cases import LLAMA, put_params, random_values
from tests.reference.dpo import answer_logprob

VALUES = random_values(param_specs(LLAMA), seed=0)
LENGTH = 12


def pairs(num: int) -> list[PairRow]:
    """Pairs with prompts of 0 to 2 tokens and answers of 2 to 8."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(num):
        prompt = rng.integers(3, LLAMA.vocab_size, n % 3)
        chosen, rejected = (
            np.append(prompt, rng.integers(3, LLAMA.vocab_size, rng.integers(2, 9))).astype(
                np.int32
            )
            for _ in range(2)
        )
        rows.append(PairRow(chosen, rejected, len(prompt)))
    return rows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Chosen and rejected, `[2, 6]`, each row alone and without padding tricks."""
    layout = compute_layout(LLAMA, make_mesh(parse_mesh("1x1"), 1))
    params = put_params(VALUES, param_specs(LLAMA), layout)

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        return logits_from_hidden(params, forward(params, tokens, LLAMA, layout), LLAMA)

    sums = []
    with jax.set_mesh(layout.mesh):
        for kind in ("chosen", "rejected"):
            for pair in pairs(6):
                row = getattr(pair, kind)
                padded = np.zeros((1, LENGTH), np.int32)
                padded[0, : len(row)] = row
                scores = log_softmax(np.asarray(logits(put_batch(padded, layout)))[0])
                logprobs = scores[np.arange(LENGTH - 1), padded[0, 1:]]
                sums.append(answer_logprob(logprobs, pair.prompt_length, len(row)))
    return np.array(sums).reshape(2, 6)


@pytest.mark.parametrize("mesh", ["1x1", "8x1", "4x2"])
def test_one_pass_over_both_rows_of_every_pair(mesh, expected, tolerance):
    """On every mesh, filler rows scored as nothing."""
    mesh = make_mesh(parse_mesh(mesh), 2 if mesh == "4x2" else 1)
    compute = compute_layout(LLAMA, mesh)
    batch = collate_pairs(pairs(6), 8, length=LENGTH)
    with jax.set_mesh(mesh):
        params = put_params(VALUES, param_specs(LLAMA), store_layout(LLAMA, mesh))
        program = jax.jit(
            partial(
                pair_logprobs, model=ModelOnMesh(LLAMA, compute),
                num_answer=longest_answer(pairs(6)), remat="none",
            )
        )  # fmt: skip
        got = np.stack(program(params, put_batch(batch, compute)))
    np.testing.assert_allclose(got[:, :6], expected, **tolerance(np.float32))
    np.testing.assert_array_equal(got[:, 6:], 0)


class Letters:
    """A tokenizer whose text of a token is a letter."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(97 + token) for token in ids)


class Named:
    """A model by its config and tokenizer."""

    def __init__(self, max_positions: int) -> None:
        self.tokenizer = Letters()
        self.cfg = SimpleNamespace(max_positions=max_positions, stop_ids=())


def test_held_out_prompts_come_out_of_pairs():
    """Their text, and room for the longest answer; a pair without prompt asks nothing."""
    rows = [
        PairRow(np.array([1, 2, 3]), np.array([1, 2, 4, 5, 6]), 2),
        PairRow(np.array([9, 9]), np.array([8]), 0),
    ]
    (prompt,), longest = prompts_of(rows, Named(32))  # pyright: ignore[reportArgumentType]
    assert prompt.prompt == "bc"
    assert prompt.tokens.tolist() == [1, 2]
    assert longest == 3
    assert prompts_of(rows, Named(4))[1] == 2  # pyright: ignore[reportArgumentType]
    assert prompts_of([], Named(4))[0] == []  # pyright: ignore[reportArgumentType]


def test_what_prompts_are_padded_to_leaves_room_for_an_answer(monkeypatch, tmp_path):
    """Of the longest prompt, and of the longest answer, which is another pair's."""
    monkeypatch.setattr(answers, "HybridEngine", lambda *_: None)
    lengths = ((57, 7), (9, 40))
    rows = [PairRow(np.arange(p + a) % 26, np.arange(p + 1) % 26, p) for p, a in lengths]
    model: Any = Named(64)
    run: Any = SimpleNamespace(mesh=None, directory=tmp_path)
    held_out = answers.HeldOutAnswers(run, model, rows, 2)
    assert held_out.max_answer == 7
    assert held_out.batches[0].tokens_BP.shape == (2, 57)
