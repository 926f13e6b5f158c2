"""A model by name: its config, its tokenizer and where its weights are."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from meshes.layout import Layout
from rlhf_jax.data import byte_tokenizer
from rlhf_jax.hf.checkpoint import Checkpoint, open_checkpoint
from rlhf_jax.hf.config_io import load_config, read_source_config
from rlhf_jax.hf.convert import Head, has_scalar_head, load_params, replaced
from rlhf_jax.hf.hub import resolve
from rlhf_jax.hf.peft import (
    Adapter,
    check_fits,
    is_adapter_directory,
    open_adapter,
    put_factors,
    read_factors,
)
from rlhf_jax.hf.pieces import SCORE_HEAD
from rlhf_jax.hf.tokenizer import load_tokenizer
from rlhf_jax.models.adapted import merge
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import (
    Params,
    ScalarModel,
    init_params,
    param_specs,
    scalar_specs,
)
from rlhf_jax.models.quantized import declare_int8, place_by_path, quantize_params
from rlhf_jax.models.tiny import QUICKSTART, quickstart_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """What a name stands for; weights are read by `params` and `scalar_model`, onto a mesh.

    `directory` is None for the built-in model, which is born from random numbers. Of an adapter
    everything but `name`, `adapter` and a tokenizer of its own is its base model's; with
    `merged=False` its factors are read beside their weights, otherwise added to them.
    """

    name: str
    cfg: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path | None
    source_config: Mapping[str, Any] | None
    adapter: Adapter | None = None

    @property
    def is_scalar(self) -> bool:
        """Whether the weights are those of a reward model."""
        if self.adapter is not None and SCORE_HEAD in self.adapter.whole:
            return True
        return self.directory is not None and has_scalar_head(self.directory)

    @property
    def home(self) -> Path | None:
        """The directory that `name` stands for: the adapter's, where it is one."""
        return self.directory if self.adapter is None else self.adapter.directory

    def checkpoint(self) -> Checkpoint | None:
        """The tensors that parameters are read from, the factors of an adapter left out."""
        if self.directory is None:
            return None
        instead = {} if self.adapter is None else self.adapter.whole
        return replaced(open_checkpoint(self.directory), self.cfg, instead)

    def params(
        self, layout: Layout, dtype: jnp.dtype, *, merged: bool = True,
        in_int8: Collection[str] = (), key: jax.Array,
    ) -> Params[jax.Array]:  # fmt: skip
        """The decoder's parameters in `layout`; matrices whose paths are in `in_int8` quantized."""
        specs = param_specs(self.cfg)
        if self.directory is None:
            return init_params(declare_int8(specs, in_int8), layout, dtype, key=key)
        return self._read(self.directory, specs, layout, dtype, "load", in_int8, merged=merged)

    def scalar_model(
        self, layout: Layout, dtype: jnp.dtype, *, merged: bool = True,
        in_int8: Collection[str] = (), key: jax.Array,
    ) -> ScalarModel[jax.Array]:  # fmt: skip
        """The parameters with a scalar head: the checkpoint's, or zeros where it has none."""
        specs = scalar_specs(self.cfg)
        if self.directory is None:
            return init_params(declare_int8(specs, in_int8), layout, dtype, key=key)
        head = "load" if self.is_scalar else "new"
        return self._read(self.directory, specs, layout, dtype, head, in_int8, merged=merged)

    def _read(
        self, directory: Path, specs: Any, layout: Layout, dtype: jnp.dtype, head: Head,
        in_int8: Collection[str], *, merged: bool,
    ) -> Any:  # fmt: skip
        """Parameters from files. An adapter is merged before the sum is quantized, which then is
        once whole on the devices.
        """
        adapter = self.adapter
        if adapter is None:
            return load_params(
                directory, self.cfg, specs, layout, dtype, head=head, in_int8=in_int8
            )
        near = replace(layout, memory=None)
        base = load_params(
            directory, self.cfg, specs, near, dtype, head=head, instead=adapter.whole,
            in_int8=() if merged else in_int8,
        )  # fmt: skip
        model = put_factors(read_factors(adapter, self.cfg), base, self.cfg, near, dtype)
        if not merged:
            return model
        places = place_by_path(specs, lambda path: near if path in in_int8 else layout)
        with jax.set_mesh(layout.mesh):
            whole = jax.jit(merge, out_shardings=places)(model)
        del base, model
        return quantize_params(whole, specs, layout, in_int8)


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
    if is_adapter_directory(directory):
        return find_adapted(name, open_adapter(directory), scalar=scalar)
    cfg = load_config(directory, scalar=scalar)
    tokenizer = load_tokenizer(directory, cfg)
    cfg = replace(cfg, eos_token_id=stop_ids(cfg, tokenizer))
    return Pretrained(name, cfg, tokenizer, directory, read_source_config(directory))


def find_adapted(name: str, adapter: Adapter, *, scalar: bool) -> Pretrained:
    """The base model that an adapter names, with the adapter; errors name both."""
    try:
        base = find_pretrained(adapter.base, scalar=scalar)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(
            f"{name} is an adapter, its base model {adapter.base} cannot be read: {error}"
        ) from error
    if base.directory is None or base.adapter is not None:
        kind = "an adapter itself" if base.adapter else "not a checkpoint"
        raise ValueError(f"{name} is an adapter for {adapter.base}, which is {kind}")
    check_fits(adapter, base.cfg, adapter.base)
    base = replace(base, name=name, adapter=adapter)
    if not (adapter.directory / "tokenizer.json").is_file():
        return base
    try:
        tokenizer = load_tokenizer(adapter.directory, base.cfg)
    except ValueError as error:  # such as one with a pad token that the base has no row for
        log.warning("%s: the tokenizer of %s is taken, since %s", name, adapter.base, error)
        return base
    cfg = replace(base.cfg, eos_token_id=stop_ids(base.cfg, tokenizer))
    return replace(base, cfg=cfg, tokenizer=tokenizer)
