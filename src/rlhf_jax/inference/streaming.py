"""Answers that come some tokens at a time, from a cache that stays on the devices between turns."""

import functools
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from meshes.axes import DATA
from meshes.multihost import to_host
from meshes.reshard import put_batch, put_rows
from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.generate import Decoding, LoopState, decode_until, for_decoding
from rlhf_jax.engine.graphs import graph_options
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.inference.pieces import common_length, text_pieces
from rlhf_jax.inference.rows import check_ids
from rlhf_jax.models.cache import CACHE_AXES, KVCache
from rlhf_jax.models.chunk import feed
from rlhf_jax.models.params import Params

FED_AT_ONCE = 64
"""Tokens of a prompt that one call reads; the last call pads its share."""

TOKENS_A_CALL = 8
"""New tokens between two looks at what the person wants."""


class Streamer:
    """Answers one prompt after another with two programs, whatever their lengths.

    Prompts are read in pieces of `FED_AT_ONCE` tokens, behind what the cache holds of them
    already: of a conversation only the last turn is read. Answers are those of `Model.generate`
    with the same settings and seed, up to the rounding of logits.

    Attributes:
        room: tokens that a prompt may have.
    """

    def __init__(
        self,
        engine: HybridEngine,
        params: Params[jax.Array],
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingConfig,
        context: int,
    ) -> None:
        self.room = context - sampling.max_new_tokens
        self._engine, self._tokenizer, self._sampling = engine, tokenizer, sampling
        # Where decoding shares weights out otherwise than storage, they are gathered once.
        self._params = engine.pin(params) if engine.mesh.shape[DATA] > 1 else params
        decoding = Decoding(engine.cfg, engine.rollout, sampling, engine.stop_ids)
        self._feed = jax.jit(functools.partial(_feed, decoding=decoding), donate_argnames="cache")
        self._decode = jax.jit(
            functools.partial(_decode, decoding=decoding),
            donate_argnames="state",
            compiler_options=graph_options(engine.rollout),
        )
        self._empty = jax.jit(
            functools.partial(
                _empty_cache, context + FED_AT_ONCE, params.embed_VW.dtype, decoding=decoding
            )
        )
        self._cache: KVCache | None = None
        self._cached: list[int] = []

    def answer(self, prompt: Sequence[int], *, seed: int = 0) -> Generator[str]:
        """The answer's text as it comes: without stop token, no character in halves."""
        tokens, stop_ids = self.tokens(prompt, seed=seed), self._engine.stop_ids
        return text_pieces(self._tokenizer, prompt, tokens, stop_ids)

    def tokens(self, prompt: Sequence[int], *, seed: int = 0) -> Generator[list[int]]:
        """The answer's tokens as they come, up to `TOKENS_A_CALL` at a time, the stop token last.

        Whoever stops iterating (`close` the iterator) stops the answer.

        Raises:
            ValueError: a text, an empty prompt, one with more than `room` tokens, or ids outside
                the vocabulary.
        """
        return self._tokens(self._checked(prompt), seed)

    def _tokens(self, ids: list[int], seed: int) -> Generator[list[int]]:
        state, produced = self._read(ids), []
        rows, key = self._rows(ids), jax.random.key(seed)
        limit = self._sampling.max_new_tokens
        try:
            done = False
            while not done:
                until = min(len(produced) + TOKENS_A_CALL, limit)
                with jax.set_mesh(self._engine.mesh):
                    state = self._decode(self._params, rows, state, np.int32(until), key=key)
                tokens, lengths, ended = to_host((state.tokens_RB, state.lengths_B, state.done_B))
                new = tokens[len(produced) : lengths[0], 0].tolist()
                produced += new
                done = bool(ended[0]) or len(produced) == limit
                yield new
        finally:
            # The last token was sampled and not read; a program that was cut off took its cache.
            self._cached = (ids + produced)[:-1]
            self._cache = None if state.cache.keys[0].is_deleted() else state.cache

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            raise ValueError(
                f"got the text {prompt[:20]!r}, a streamer takes token ids: "
                "model.tokenizer.encode(text) gives them"
            )
        if not 0 < len(prompt) <= self.room:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, it must have 1 to {self.room}: the context "
                f"also holds an answer of up to {self._sampling.max_new_tokens}"
            )
        return check_ids(prompt, self._engine.cfg.vocab_size, "the prompt").tolist()

    def _read(self, ids: list[int]) -> LoopState:
        """All of a prompt but its last token into the cache; what is there already stays."""
        cache, self._cache = self._cache, None
        if cache is None:
            self._cached = []
            with jax.set_mesh(self._engine.mesh):
                cache = self._empty()
        for start in range(common_length(self._cached, ids[:-1]), len(ids) - 1, FED_AT_ONCE):
            piece = np.zeros(FED_AT_ONCE, np.int32)
            here = ids[start : min(start + FED_AT_ONCE, len(ids) - 1)]
            piece[: len(here)] = here
            tokens, places = put_batch(
                (self._alike(piece), self._alike(np.int32(start))), self._engine.rollout
            )
            with jax.set_mesh(self._engine.mesh):
                cache = self._feed(self._params, tokens, places, cache=cache)
        return self._first_state(cache, ids)

    def _first_state(self, cache: KVCache, ids: list[int]) -> LoopState:
        """Nothing said yet: the first decode step reads the prompt's last token."""
        layout, num_rows = self._engine.rollout, self._num_rows
        filled = self._sampling.max_new_tokens, num_rows
        tokens, logprobs = (
            jax.make_array_from_callback(
                filled, layout.sharding(None, "batch"), lambda at, z=zeros: z[at]
            )
            for zeros in (np.zeros(filled, np.int32), np.zeros(filled, np.float32))
        )
        seen = None
        if self._sampling.penalises:
            seen = self._alike(np.isin(np.arange(self._engine.cfg.padded_vocab), ids))
        rows: Any = (self._alike(np.int32(0)), self._alike(np.int32(ids[-1])), self._fillers, seen)
        lengths, last, done, seen = put_batch(rows, layout)
        index = put_rows(np.array(0, np.int32), layout, None)
        return LoopState(cache, index, tokens, logprobs, lengths, last, done, seen)

    def _rows(self, ids: list[int]) -> PromptBatch:
        """What sampling knows of the prompt: row 0 is asked, the mesh may need more."""
        batch = PromptBatch(
            tokens_BP=self._alike(np.zeros(0, np.int32)),
            lengths_B=self._alike(np.int32(len(ids))),
            sample_ids_B=self._alike(np.int32(0)),
            valid_B=1 - self._fillers.astype(np.float32),
        )
        return put_batch(batch, self._engine.rollout)

    @property
    def _num_rows(self) -> int:
        return self._engine.rollout.batch_size_divisor

    @property
    def _fillers(self) -> np.ndarray:
        return np.arange(self._num_rows) > 0

    def _alike(self, row: np.ndarray | np.int32) -> np.ndarray:
        return np.repeat(np.asarray(row)[None], self._num_rows, axis=0)


def _empty_cache(length: int, dtype: jnp.dtype, decoding: Decoding) -> KVCache:
    """Zeros; `FED_AT_ONCE` more than the context, where the padding of a last piece may fall."""
    cfg, layout = decoding.cfg, decoding.layout
    shape = (layout.batch_size_divisor, cfg.num_kv_heads, length, cfg.head_size)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, dtype, out_sharding=layout.sharding(*CACHE_AXES))

    layers = range(cfg.num_layers)
    return KVCache([zeros() for _ in layers], [zeros() for _ in layers])


def _feed(
    params: Params[jax.Array],
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: KVCache,
    decoding: Decoding,
) -> KVCache:
    params = for_decoding(params, decoding)
    return feed(params, tokens_BT, start_B, cache, decoding.cfg, decoding.layout)[1]


def _decode(
    params: Params[jax.Array],
    rows: PromptBatch,
    state: LoopState,
    until: jax.Array,
    decoding: Decoding,
    *,
    key: jax.Array,
) -> LoopState:
    params = for_decoding(params, decoding)
    return decode_until(params, rows, state, until, decoding, key=key)
