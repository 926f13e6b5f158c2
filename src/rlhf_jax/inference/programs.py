"""Logits, log-probabilities and scores of whole rows, in batches of few shapes."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshes.multihost import to_host
from meshes.reshard import put_rows
from rlhf_jax.data.batches import collate_text
from rlhf_jax.data.tokenize import SftRow
from rlhf_jax.inference.rows import batch_rows, bucket, check_fits, like_lengths
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import forward, gather_outer
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.params import Params, ScalarModel, compute_layout
from rlhf_jax.models.scoring import scalar_scores, score_tokens, take_window


class RowPrograms:
    """The compiled programs of one model on one mesh that read whole rows; params in STORE."""

    def __init__(self, cfg: ModelConfig, mesh: jax.sharding.Mesh) -> None:
        self.cfg, self.mesh = cfg, mesh
        self.layout = compute_layout(cfg, mesh)
        self._logits = jax.jit(self._trace_logits)
        self._logprobs = jax.jit(self._trace_logprobs)
        self._scores = jax.jit(self._trace_scores)

    def logits(
        self, params: Params[jax.Array], rows: Sequence[np.ndarray], batch_size: int
    ) -> Iterator[np.ndarray]:
        """Logits of each row, `[its length, V]` over the true vocabulary."""
        results = self._run(lambda tokens, lengths: self._logits(params, tokens), rows, batch_size)
        for row, logits_TV in zip(rows, results, strict=True):
            yield logits_TV[: len(row), : self.cfg.vocab_size]

    def logprobs(
        self, params: Params[jax.Array], rows: Sequence[np.ndarray], batch_size: int
    ) -> Iterator[np.ndarray]:
        """Log-probabilities of each row's tokens but the first, given those before."""
        run = self._logprobs
        results = self._run(lambda tokens, lengths: run(params, tokens), rows, batch_size)
        for row, logprobs_T in zip(rows, results, strict=True):
            yield logprobs_T[: len(row) - 1]

    def scores(
        self, model: ScalarModel[jax.Array], rows: Sequence[np.ndarray], batch_size: int
    ) -> Iterator[float]:
        """The head's value at the last token of each row."""
        run = self._scores
        results = self._run(lambda tokens, lengths: run(model, tokens, lengths), rows, batch_size)
        return (float(score) for score in results)

    def _run(
        self,
        program: Callable[[jax.Array, jax.Array], jax.Array],
        rows: Sequence[np.ndarray],
        batch_size: int,
    ) -> Iterator[np.ndarray]:
        """What `program(tokens_BT, lengths_B)` gives for each row.

        Rows of like length share a batch, which is as long as its bucket: short ones cost little.
        """
        limit = self.cfg.max_positions
        check_fits(rows, 0, limit)
        size = batch_rows(len(rows), self.layout.batch_size_divisor, batch_size)
        results: list[np.ndarray | None] = [None] * len(rows)
        for numbers in like_lengths([len(row) for row in rows], size):
            part = [SftRow(rows[number], 0) for number in numbers]
            length = bucket(max(len(row.tokens) for row in part), limit)
            batch = collate_text(part, size, length=length)
            tokens = put_rows(batch.tokens_BT, self.layout, "batch")
            lengths = put_rows(batch.lengths_B, self.layout, "batch")
            with jax.set_mesh(self.mesh):
                answers = to_host(program(tokens, lengths))
            for number, answer in zip(numbers, answers, strict=False):
                results[number] = answer
        return (result for result in results if result is not None)

    def _trace_logits(self, params: Params[jax.Array], tokens_BT: jax.Array) -> jax.Array:
        hidden = forward(params, tokens_BT, self.cfg, self.layout)
        outer = gather_outer(params, self.cfg, self.layout)
        return logits_from_hidden(outer, hidden, self.cfg)

    def _trace_logprobs(self, params: Params[jax.Array], tokens_BT: jax.Array) -> jax.Array:
        hidden = forward(params, tokens_BT, self.cfg, self.layout)
        outer = gather_outer(params, self.cfg, self.layout)
        ahead_BT = jnp.roll(tokens_BT, -1, axis=1)
        return score_tokens(outer, hidden, ahead_BT, self.cfg, self.layout)[0]

    def _trace_scores(
        self, model: ScalarModel[jax.Array], tokens_BT: jax.Array, lengths_B: jax.Array
    ) -> jax.Array:
        scores = scalar_scores(model, forward(model.body, tokens_BT, self.cfg, self.layout))
        return take_window(scores, lengths_B - 1, 1, self.layout)[:, 0]
