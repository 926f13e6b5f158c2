"""A model by name: its config, its tokenizer and where its weights are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from meshes.layout import Layout
from rlhf_jax.data import byte_tokenizer
from rlhf_jax.hf.config_io import load_config, read_source_config
from rlhf_jax.hf.convert import has_scalar_head, load_params
from rlhf_jax.hf.hub import resolve
from rlhf_jax.hf.tokenizer import load_tokenizer
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import (
    Params,
    ScalarModel,
    init_params,
    param_specs,
    scalar_specs,
)
from rlhf_jax.models.tiny import QUICKSTART, quickstart_config


@dataclass(frozen=True)
class Pretrained:
    """What a name stands for; weights are read by `params` and `scalar_model`, onto a mesh.

    `directory` is None for the built-in model, which is born from random numbers.
    """

    name: str
    cfg: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path | None
    source_config: Mapping[str, Any] | None

    @property
    def is_scalar(self) -> bool:
        """Whether the weights are those of a reward model."""
        return self.directory is not None and has_scalar_head(self.directory)

    def params(self, layout: Layout, dtype: jnp.dtype, *, key: jax.Array) -> Params[jax.Array]:
        """The decoder's parameters in `layout`."""
        specs = param_specs(self.cfg)
        if self.directory is None:
            return init_params(specs, layout, dtype, key=key)
        return load_params(self.directory, self.cfg, specs, layout, dtype)

    def scalar_model(
        self, layout: Layout, dtype: jnp.dtype, *, key: jax.Array
    ) -> ScalarModel[jax.Array]:
        """The parameters with a scalar head: the checkpoint's, or zeros where it has none."""
        specs = scalar_specs(self.cfg)
        if self.directory is None:
            return init_params(specs, layout, dtype, key=key)
        head = "load" if self.is_scalar else "new"
        return load_params(self.directory, self.cfg, specs, layout, dtype, head=head)


def stop_ids(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int | tuple[int, ...] | None:
    """The config's stop ids and the tokenizer's EOS, which training puts behind every answer."""
    ids = dict.fromkeys(cfg.stop_ids)
    if isinstance(tokenizer.eos_token_id, int):
        ids[tokenizer.eos_token_id] = None
    return next(iter(ids)) if len(ids) == 1 else tuple(ids) or None


def find_pretrained(name: str, *, scalar: bool = False) -> Pretrained:
    """A local directory, a Hub name, or `quickstart`; errors say what was tried.

    With `scalar` it is meant for a scalar head, which needs no unembedding.
    """
    if name == QUICKSTART:
        tokenizer = byte_tokenizer.byte_tokenizer()
        cfg = quickstart_config(
            byte_tokenizer.VOCAB_ROWS,
            byte_tokenizer.BOS_ID,
            byte_tokenizer.EOS_ID,
            byte_tokenizer.PAD_ID,
        )
        return Pretrained(name, cfg, tokenizer, None, None)
    directory = resolve(name)
    cfg = load_config(directory, scalar=scalar)
    tokenizer = load_tokenizer(directory, cfg)
    cfg = replace(cfg, eos_token_id=stop_ids(cfg, tokenizer))
    return Pretrained(name, cfg, tokenizer, directory, read_source_config(directory))
