"""Drives generate, scoring and updates of a tiny model on one layout, from the same host values."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.row_passes import ModelOnMesh, answer_logprobs, join_rows
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import forward, gather_outer
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.params import Params, ScalarModel, param_specs, scalar_specs
from tests.models.cases import put_params, random_values

P = 6
PROMPT_LENGTHS = np.array([3, 4, 5, 6, 6, 2, 1, 3], np.int32)


def prompts(*, width: int = P, seed: int = 0) -> PromptBatch:
    """Eight prompts of the same tokens whatever the width; the last row is filler."""
    tokens = np.random.default_rng(seed).integers(3, 99, (8, P)).astype(np.int32)
    return PromptBatch(
        tokens_BP=np.pad(tokens, ((0, 0), (0, width - P)), constant_values=77),
        lengths_B=PROMPT_LENGTHS,
        sample_ids_B=np.arange(100, 108, dtype=np.int32),
        valid_B=np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32),
    )


@dataclass(frozen=True)
class Driver:
    """A model with values from seeds on a mesh; everything returned is NumPy."""

    cfg: ModelConfig
    mesh_name: str = "1x1"
    inference_tp: int = 1
    stop_ids: tuple[int, ...] = ()
    dtype: DTypeLike = np.float32
    slots: int | None = None
    weights: Narrow = "same"
    kv_cache: Narrow = "same"

    @cached_property
    def engine(self) -> HybridEngine:
        mesh = make_mesh(parse_mesh(self.mesh_name), self.inference_tp)
        return HybridEngine(
            self.cfg, mesh, self.stop_ids,
            slots=self.slots, weights=self.weights, kv_cache=self.kv_cache,
        )  # fmt: skip

    @property
    def store(self) -> Layout:
        return self.engine.store

    @property
    def place(self) -> ModelOnMesh:
        return ModelOnMesh(self.cfg, self.engine.compute)

    def actor(self, seed: int = 1) -> Params[jax.Array]:
        """A decoder in STORE."""
        specs = param_specs(self.cfg)
        return put_params(random_values(specs, seed=seed), specs, self.store, self.dtype)

    def scalar(self, seed: int) -> ScalarModel[jax.Array]:
        """A reward model or critic in STORE."""
        specs = scalar_specs(self.cfg)
        return put_params(random_values(specs, seed=seed), specs, self.store, self.dtype)

    def generate(
        self, sampling: SamplingConfig, batch: PromptBatch | None = None, *, seed: int = 5
    ) -> Rollout:
        rollout = self.engine.generate(
            self.actor(), prompts() if batch is None else batch, sampling, key=jax.random.key(seed)
        )
        return to_numpy(rollout)

    def logprobs(self, rollout: Rollout, batch: PromptBatch, temperature: float) -> np.ndarray:
        """The training graph's log-probabilities of a rollout's tokens, `[B, R]`."""

        @jax.jit
        def run(params: Any, tokens: Any, lengths: Any, answers: Any) -> jax.Array:
            rows = join_rows(tokens, lengths, answers, self.engine.compute)
            width = answers.shape[1]
            return answer_logprobs(params, rows, lengths, width, self.place, temperature)[0]

        rows = put_batch((batch.tokens_BP, batch.lengths_B, rollout.tokens_BR), self.engine.compute)
        with jax.set_mesh(self.engine.mesh):
            return np.asarray(run(self.actor(), *rows))

    def rows(self, rollout: Rollout, batch: PromptBatch) -> np.ndarray:
        """Prompt and answer in one row, `[B, P + R]`."""
        layout = self.engine.compute
        pieces = put_batch((batch.tokens_BP, batch.lengths_B, rollout.tokens_BR), layout)
        return np.asarray(self.jit(join_rows, layout=layout)(*pieces))

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        """The training graph's logits of whole rows, `[B, T, V]`."""

        def run(params: Any, tokens: jax.Array) -> jax.Array:
            hidden = forward(params, tokens, self.cfg, self.place.layout)
            outer = gather_outer(params, self.cfg, self.place.layout)
            return logits_from_hidden(outer, hidden, self.cfg)

        tokens = put_batch(tokens_BT, self.engine.compute)
        return np.asarray(self.jit(run)(self.actor(), tokens))

    def jit(self, function: Any, **static: Any) -> Any:
        """`function` compiled and called under the mesh."""
        program = jax.jit(partial(function, **static))

        def call(*args: Any) -> Any:
            with jax.set_mesh(self.engine.mesh):
                return program(*args)

        return call


def to_numpy[Tree](tree: Tree) -> Tree:
    """The whole tree on the host."""
    return jax.tree.map(np.asarray, tree)
