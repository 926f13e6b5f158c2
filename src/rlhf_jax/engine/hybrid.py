"""The hybrid engine: one model, one mesh, and the layouts that training and generation want."""

import functools

import jax

from meshes.layout import Layout
from meshes.reshard import put_batch
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.generate import Decoding, Rollout, for_decoding, generate
from rlhf_jax.engine.graphs import graph_options
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.slots import generate_in_slots
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.params import (
    Params,
    compute_layout,
    generate_layout,
    store_layout,
)


class HybridEngine:
    """Layouts and compiled programs of one decoder on one mesh.

    Generation takes the very buffers that the update wrote. What another layout needs is gathered
    inside its program, and nothing here holds parameters unless `pin` is called. With
    `merge_adapters` it decodes with adapters merged into a copy of their weights, made anew in
    every generation (or by `pin`).

    With `slots` no more rows than that decode at once and have a cache: of a larger batch, a row
    that ends makes room for the next prompt. Answers are the same.

    `weights` and `kv_cache` ("int8", "fp8") decode in one byte a number: the log-probabilities are
    those of the policy that is sampled then, not of the parameters.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: jax.sharding.Mesh,
        stop_ids: tuple[int, ...],
        *,
        merge_adapters: bool = False,
        slots: int | None = None,
        weights: Narrow = "same",
        kv_cache: Narrow = "same",
    ) -> None:
        self.cfg = cfg
        self.mesh = mesh
        self.stop_ids = stop_ids
        self.merge_adapters = merge_adapters
        self.slots = slots
        self.weights: Narrow = weights
        self.kv_cache: Narrow = kv_cache
        self.store: Layout = store_layout(cfg, mesh)
        self.compute: Layout = compute_layout(cfg, mesh)
        self.rollout: Layout = generate_layout(cfg, mesh)
        check_slots(slots, self.rollout.batch_size_divisor)
        self._generate = functools.cache(self._compile_generate)
        self._gather = jax.jit(lambda p: for_decoding(p, self._decoding(SamplingConfig())))

    def generate(
        self,
        params: Params[jax.Array],
        batch: PromptBatch,
        sampling: SamplingConfig,
        *,
        key: jax.Array,
    ) -> Rollout:
        """Answers to a global batch of prompts; `params` in STORE, or as `pin` returned them.

        Raises:
            ValueError: prompts and answers do not fit the position table, or the batch does not
                divide over the devices that share it.
        """
        self.check_batch(batch.tokens_BP.shape, sampling)
        rows = put_batch(batch, self.rollout)
        with jax.set_mesh(self.mesh):
            return self._generate(sampling)(params, rows, key=key)

    def pin(self, params: Params[jax.Array]) -> Params[jax.Array]:
        """A gathered copy for several generations between two updates. It owns its buffers, so an
        update may donate the originals.
        """
        with jax.set_mesh(self.mesh):
            return self._gather(params)

    def check_batch(self, shape: tuple[int, ...], sampling: SamplingConfig) -> None:
        """ValueError where a batch of prompts `[B, P]` does not fit the mesh or the model."""
        rows, prompt = shape
        divisor = self.rollout.batch_size_divisor
        if rows % divisor:
            raise ValueError(
                f"a batch of {rows} prompts does not divide over {divisor} devices: use a "
                f"multiple of {divisor}, or a larger --inference-tp-size"
            )
        length = prompt + sampling.max_new_tokens
        if length > self.cfg.max_positions:
            raise ValueError(
                f"prompt + answer = {prompt} + {sampling.max_new_tokens} = {length} tokens, the "
                f"model has {self.cfg.max_positions} positions: shorten one of them"
            )

    def _decoding(self, sampling: SamplingConfig) -> Decoding:
        return Decoding(
            self.cfg, self.rollout, sampling, self.stop_ids, self.merge_adapters,
            self.weights, self.kv_cache,
        )  # fmt: skip

    def _compile_generate(self, sampling: SamplingConfig):
        decoding = self._decoding(sampling)

        def rollout(params: Params[jax.Array], rows: PromptBatch, *, key: jax.Array) -> Rollout:
            if self.slots is None or rows.tokens_BP.shape[0] <= self.slots:
                return generate(params, rows, decoding, key=key)
            return generate_in_slots(params, rows, self.slots, decoding, key=key)

        return jax.jit(rollout, compiler_options=graph_options(self.rollout))


def check_slots(slots: int | None, divisor: int) -> None:
    """ValueError where slots do not divide over the devices that share a batch."""
    if slots is not None and (slots < 1 or slots % divisor):
        raise ValueError(
            f"{slots} slots do not divide over {divisor} devices: use a multiple of {divisor}"
        )
