"""A model for people: load it, ask it, score with it, save it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import default_inference_tp, make_mesh
from meshes.multihost import start_devices, to_host
from rlhf_jax.data.batches import collate_prompts
from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.memory import ModelMemory, Rows
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.hf.export import DtypeName, save_hf, save_reward_hf
from rlhf_jax.hf.peft import CONFIG_FILE
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.inference.answers import Generation, read_answers
from rlhf_jax.inference.dtypes import LoadDtype, full_dtype
from rlhf_jax.inference.places import find_policy
from rlhf_jax.inference.programs import RowPrograms
from rlhf_jax.inference.room import rows_that_fit
from rlhf_jax.inference.rows import (
    Text,
    batch_rows,
    bucket,
    check_fits,
    check_ids,
    check_rectangle,
    chunks,
    dealt,
    encode,
    take_rows,
)
from rlhf_jax.inference.streaming import Streamer
from rlhf_jax.models.params import Params, ScalarModel, generate_layout, store_layout
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.stages.statistics_file import keep_statistics

BATCH_SIZE = 32
TURNS = 32
"""Prompts that one call of the program answers, for each that it answers at once."""
MAX_PROMPTS, MAX_SAMPLES = 2**20, 2**10
"""Of one call: together they number a sample in 31 bits."""


def load(
    name: str | Path,
    *,
    mesh: str | None = None,
    dtype: LoadDtype = "float32",
    inference_tp_size: int | None = None,
    seed: int = 0,
) -> "Model":
    """A model by the path of a Hugging Face directory or of a run, its name on the Hub, or
    `"quickstart"`. Of a run it is the newest policy: `actor/`, else `dpo/`, else `sft/`.

    `mesh` is FxT or RxFxT (`"4x2"`); without it the model is spread over all visible devices. On
    a CPU the devices of a mesh are simulated, if JAX has not started yet. `seed` makes the
    built-in `quickstart`, which is untrained; no other model depends on it.

    Raises:
        ValueError, FileNotFoundError: there is no such model, or it does not fit the mesh.
    """
    dtype = full_dtype(dtype)
    name = find_policy(str(name))
    source = find_pretrained(name)
    if source.is_scalar:  # it has no unembedding, whatever the config says of the language model's
        source = find_pretrained(name, scalar=True)
    keep_compiled_programs()
    shape = start_devices(mesh)
    if inference_tp_size is None:
        heads = source.cfg.num_heads, source.cfg.num_kv_heads
        inference_tp_size = default_inference_tp(shape, *heads)
    return Model(source, make_mesh(shape, inference_tp_size), dtype, key=jax.random.key(seed))


class Model:
    """A language model or a reward model on a mesh, with its tokenizer and compiled programs.

    Made by `load`. Inputs are texts or token ids, outputs are Python values and NumPy arrays,
    whole on every process. Programs compile at first use, once per shape.

    Attributes:
        name: what it was loaded by.
        config: `ModelConfig`.
        tokenizer: a tokenizer of transformers.
        mesh: `jax.sharding.Mesh`.
        params: `Params`, or the `ScalarModel` of a reward model, fully sharded.
        stop_ids: tokens that end an answer unless `generate` is told others.
        source: `Pretrained`, what its name stands for.
    """

    params: Params[jax.Array] | ScalarModel[jax.Array]

    def __init__(
        self, source: Pretrained, mesh: jax.sharding.Mesh, dtype: LoadDtype, *, key: jax.Array
    ) -> None:
        self.name, self.config, self.mesh = source.name, source.cfg, mesh
        self.tokenizer = source.tokenizer
        self._encoder = Encoder(source.tokenizer)
        self.stop_ids = source.cfg.stop_ids
        self.source = source
        self._dtype = full_dtype(dtype)
        store = store_layout(source.cfg, mesh)
        read = source.scalar_model if source.is_scalar else source.params
        with jax.set_mesh(mesh):
            self.params = read(store, jnp.dtype(dtype), key=key)
        self._programs = RowPrograms(source.cfg, mesh)
        fused = jax.default_backend() == "gpu" and dtype == "bfloat16"
        self._memory = ModelMemory(
            source.cfg, mesh, jnp.dtype(dtype), None, source.is_scalar, fused_attention=fused
        )
        self._engine = cache(
            lambda stop_ids, slots: HybridEngine(source.cfg, mesh, stop_ids, slots=slots)
        )

    @property
    def is_reward_model(self) -> bool:
        """Whether it gives scores; otherwise it gives logits and answers."""
        return isinstance(self.params, ScalarModel)

    def generate(
        self,
        prompts: Sequence[Text],
        *,
        max_new_tokens: int = 32,
        min_new_tokens: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        num_samples: int = 1,
        stop_ids: Sequence[int] | int | None = None,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        prompt_length: int | None = None,
    ) -> list[Generation]:
        """`num_samples` answers to each prompt, those to one prompt side by side.

        Temperature 0 is greedy; `SamplingConfig` says what the other settings do. `stop_ids`
        replace the model's own; `[]` never stops. Sample n of a prompt depends on the seed, n and
        the prompt's place in the list: not on the mesh or the batch size, and sample 0 not on how
        many are asked for.

        Prompts are padded to a power of two, or to `prompt_length`, with which one program serves
        prompts of any length up to it. About `batch_size` are answered at once: a multiple of
        what the mesh needs, never more unless the mesh needs more. Of more prompts, the next
        takes the place of one whose answer has ended. Where the keys and values of so many do not
        fit in device memory fewer are, and the log says so.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, prompt and answer longer
                than the model's positions, more than `MAX_PROMPTS` prompts, a reward model.
        """
        params = self._language_params("answers")
        sampling = SamplingConfig(
            max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty
        )
        check_counts(num_samples, batch_size)
        rows = encode(prompts, self._encoder, self.config.vocab_size)
        if not rows:
            return []
        length = self._prompt_length(rows, max_new_tokens, prompt_length)
        asked = samples_of(rows, num_samples)
        shares = generate_layout(self.config, self.mesh).batch_size_divisor
        size = batch_rows(len(asked), shares, batch_size)
        size = rows_that_fit(self._memory, Rows(size, length + max_new_tokens, max_new_tokens))
        in_slots = len(asked) > size
        engine = self._engine(self._stop_ids(stop_ids), size if in_slots else None)
        answers: list[Generation] = []
        size *= TURNS if in_slots else 1
        order = dealt(size, shares)
        for part in chunks(asked, size):
            batch = collate_prompts(part, size, buckets=(length,))
            rows = take_rows(batch, order)
            rollout = to_host(engine.generate(params, rows, sampling, key=jax.random.key(seed)))
            rollout = take_rows(rollout, np.argsort(order))
            answers += read_answers(batch, rollout, self.tokenizer)
        return answers

    def streamer(
        self,
        *,
        context: int | None = None,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] | int | None = None,
    ) -> Streamer:
        """Answers whose text comes as it is made: `streamer.answer(ids, seed=…)`.

        `context` is how many tokens prompt and answer have together at most; by default all the
        model's positions. It holds a cache of that length for one conversation.

        Raises:
            ValueError: settings out of range, no room for a prompt, a reward model.
        """
        params = self._language_params("answers")
        sampling = SamplingConfig(
            max_new_tokens, 0, temperature, top_k, top_p, min_p, repetition_penalty
        )
        positions = self.config.max_positions
        context = positions if context is None else context
        if not max_new_tokens < context <= positions:
            raise ValueError(
                f"context={context} must hold a prompt beside max_new_tokens={max_new_tokens}, "
                f"and the model has {positions} positions: change one of them"
            )
        engine = self._engine(self._stop_ids(stop_ids), None)
        return Streamer(engine, params, self.tokenizer, sampling, context)

    def logprobs(self, texts: Sequence[Text], *, batch_size: int = BATCH_SIZE) -> list[np.ndarray]:
        """Log-probabilities of each text's tokens, float32, given those in front of them.

        A text gets what the tokenizer puts in front (BOS); its first token has no prediction, so
        n tokens give n - 1 numbers: entry t belongs to token t + 1.

        Raises:
            ValueError: as `logits`.
        """
        params = self._language_params("log-probabilities")
        check_counts(1, batch_size)
        rows = encode(texts, self._encoder, self.config.vocab_size)
        return list(self._programs.logprobs(params, rows, batch_size)) if rows else []

    def logits(
        self,
        tokens_BT: np.ndarray | Sequence[Sequence[int]],
        lengths_B: np.ndarray | Sequence[int] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
    ) -> np.ndarray:
        """Logits `[B, T, V]` float32 over the true vocabulary; those at t predict token t + 1.

        Rows start at index 0 and have `lengths_B` tokens (T without it). What stands behind a
        row's end is not read, and its logits are 0.

        Raises:
            ValueError: ids outside the vocabulary, rows longer than the model's positions, a
                reward model.
        """
        params = self._language_params("logits")
        check_counts(1, batch_size)
        tokens, lengths = check_rectangle(tokens_BT, lengths_B)
        vocab = self.config.vocab_size
        rows = [
            check_ids(row[:length], vocab, f"row {number}")
            for number, (row, length) in enumerate(zip(tokens, lengths, strict=True))
        ]
        logits_BTV = np.zeros((*tokens.shape, vocab), np.float32)
        for number, logits_TV in enumerate(self._programs.logits(params, rows, batch_size)):
            logits_BTV[number, : len(logits_TV)] = logits_TV
        return logits_BTV

    def score(
        self, texts: Sequence[Text], *, add_eos: bool = True, batch_size: int = BATCH_SIZE
    ) -> list[float]:
        """The reward model's score of each text, which is a prompt with its answer.

        A string is read with EOS behind it, as the model was trained, unless `add_eos` is False;
        token ids are taken as they are. Scores are the head's own: PPO standardises them.

        Raises:
            ValueError: an empty text, ids outside the vocabulary, a text longer than the model's
                positions, a language model.
        """
        if not isinstance(self.params, ScalarModel):
            raise ValueError(
                f"{self.name} is a language model, it gives no scores: load a reward model, such "
                "as the reward/ of a run"
            )
        check_counts(1, batch_size)
        rows = encode(texts, self._encoder, self.config.vocab_size)
        rows = [
            np.append(row, np.int32(self._encoder.eos_id))
            if add_eos and isinstance(text, str)
            else row
            for row, text in zip(rows, texts, strict=True)
        ]
        return list(self._programs.scores(self.params, rows, batch_size)) if rows else []

    def save_hf(self, directory: str | Path, *, dtype: DtypeName | None = None) -> None:
        """A Hugging Face directory that `load` and transformers read; in the model's own dtype.

        Raises:
            ValueError: `directory` is a file or in one, an unknown dtype, or one that does not
                hold a value.
        """
        saved: DtypeName = full_dtype(dtype or self._dtype, get_args(DtypeName))
        target, config = Path(directory), self.source.source_config
        check_directory(target)
        if isinstance(self.params, ScalarModel):
            save_reward_hf(target, self.params, self.config, saved, self.tokenizer, config)
            keep_statistics(self.source, target)
        else:
            save_hf(target, self.params, self.config, saved, self.tokenizer, config)

    def _language_params(self, what: str) -> Params[jax.Array]:
        if isinstance(self.params, ScalarModel):
            raise ValueError(
                f"{self.name} is a reward model, it gives no {what}: use score(texts), or load a "
                "language model"
            )
        return self.params

    def _prompt_length(self, rows: list[np.ndarray], max_new_tokens: int, asked: int | None) -> int:
        check_fits(rows, max_new_tokens, self.config.max_positions)
        longest, room = max(map(len, rows)), self.config.max_positions - max_new_tokens
        if asked is not None and not longest <= asked <= room:
            raise ValueError(
                f"prompt_length={asked} must hold the longest prompt ({longest} tokens) and leave "
                f"room for {max_new_tokens} new ones (at most {room})"
            )
        return bucket(longest, room) if asked is None else asked

    def _stop_ids(self, asked: Sequence[int] | int | None) -> tuple[int, ...]:
        if asked is None:
            return self.stop_ids
        asked = (asked,) if isinstance(asked, int | float | np.number) else asked
        if not len(asked):
            return ()
        return tuple(check_ids(asked, self.config.vocab_size, "stop_ids").tolist())


def check_counts(num_samples: int, batch_size: int) -> None:
    """ValueError unless both are positive."""
    if not 1 <= num_samples <= MAX_SAMPLES or batch_size < 1:
        raise ValueError(
            f"num_samples={num_samples} must be 1 to {MAX_SAMPLES} and batch_size={batch_size} "
            "at least 1"
        )


def check_directory(target: Path) -> None:
    """ValueError where a directory cannot be made, because a file is there."""
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{target} cannot be a directory, {there} is a file: name another one")
    if (target / CONFIG_FILE).is_file():  # transformers would add it to the model once more
        raise ValueError(f"{target} holds an adapter ({CONFIG_FILE}): name another directory")


def samples_of(rows: Sequence[np.ndarray], num_samples: int) -> list[PromptRow]:
    """Each prompt `num_samples` times, side by side, every one with an id of its own."""
    if len(rows) > MAX_PROMPTS:
        raise ValueError(
            f"got {len(rows)} prompts, one call takes at most {MAX_PROMPTS}: make several calls"
        )
    return [
        PromptRow(row, sample * MAX_PROMPTS + number, "")
        for number, row in enumerate(rows)
        for sample in range(num_samples)
    ]
