"""Saving: parameters as Hugging Face directories that transformers and DeepSpeed-Chat load.

Sizes are the true ones (padding is cut off). One leaf at a time comes to the host, and the
directory appears complete or not at all.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from transformers import PreTrainedTokenizerBase

from rlhf_jax.hf.checkpoint import SINGLE_PICKLE, SINGLE_SAFETENSORS
from rlhf_jax.hf.config_io import classifier_config, export_config, generation_config, write_json
from rlhf_jax.hf.pickle_writer import write_pickle
from rlhf_jax.hf.pieces import SCORE_HEAD, VALUE_HEAD, Leaf, all_shapes, plan_leaves
from rlhf_jax.hf.safetensors_io import split_shards, write_file
from rlhf_jax.hf.tensors import FLOAT_DTYPES
from rlhf_jax.hf.tokenizer import choose_pad_id, with_pad_id
from rlhf_jax.models.adapted import is_adapted, merged
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.params import Params, ScalarModel, param_specs, scalar_specs
from rlhf_jax.models.quantized import is_quantized, widened
from rlhf_jax.runtime.disk import writing

MAX_SHARD_BYTES = 5_000_000_000
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")

DtypeName = Literal["float32", "float16", "bfloat16"]
RewardKind = Literal["sequence_classification", "deepspeed_chat"]
Entries = dict[str, tuple[np.dtype, tuple[int, ...]]]


def save_hf(
    directory: Path,
    params: Params[jax.Array],
    cfg: ModelConfig,
    dtype: DtypeName,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source_config: Mapping[str, Any] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """A causal language model as safetensors, with config, generation config and tokenizer.

    Keys of `source_config` (config.json of the model it came from) that the model does not
    determine are carried over. Every process calls this; the first one writes. Raises ValueError
    where a value does not fit `dtype`.
    """
    family = find_family(cfg.family)
    leaves = plan_leaves(param_specs(cfg), cfg, family.body_prefixes[0])
    config = export_config(cfg, dtype, family.causal_class, source_config)
    tensors = host_tensors(leaves, params, FLOAT_DTYPES[dtype])
    with staged(directory) as stage:
        write_safetensors(stage, entries_of(leaves, dtype), tensors, max_shard_bytes)
        if stage is not None:
            if tokenizer is not None:
                tokenizer.save_pretrained(str(stage))
            write_json(stage / "generation_config.json", generation_config(cfg))
            write_json(stage / "config.json", config)


def save_reward_hf(
    directory: Path,
    model: ScalarModel[jax.Array],
    cfg: ModelConfig,
    dtype: DtypeName,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source_config: Mapping[str, Any] | None = None,
    *,
    kind: RewardKind = "sequence_classification",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """A reward model or critic: transformers' sequence classifier, or DeepSpeed-Chat's step 2.

    The config's pad id is never a stop id. Both tools look for the pad id to find where a text
    ends; were it the stop id, a text's own stop token would count as padding and the score would
    be read one token early.
    """
    family = find_family(cfg.family)
    classifier = kind == "sequence_classification"
    prefix = family.body_prefixes[0 if classifier else -1]
    head = SCORE_HEAD if classifier else VALUE_HEAD
    body = replace(model.body, unembed_VW=None)
    leaves = plan_leaves(scalar_specs(replace(cfg, tie_embeddings=True)), cfg, prefix, head)
    pad_id = choose_pad_id(cfg, tokenizer)
    name = family.classifier_class if classifier else family.causal_class
    config = export_config(cfg, dtype, name, source_config) | {"pad_token_id": pad_id}
    if source_config is not None and "tie_word_embeddings" in source_config:
        config["tie_word_embeddings"] = source_config["tie_word_embeddings"]
    if classifier:
        config |= classifier_config()
    tensors = host_tensors(leaves, replace(model, body=body), FLOAT_DTYPES[dtype])
    entries = entries_of(leaves, dtype)
    with staged(directory) as stage:
        if classifier or stage is None:
            write_safetensors(stage, entries, tensors, max_shard_bytes)
        else:
            write_pickle(stage / SINGLE_PICKLE, entries, tensors)
        if stage is not None:
            if tokenizer is not None:
                with_pad_id(tokenizer, pad_id).save_pretrained(str(stage))
            write_json(stage / "config.json", config)


def entries_of(leaves: list[Leaf], dtype: DtypeName) -> Entries:
    """Dtype and shape of every tensor, in the order in which they are written."""
    return {name: (FLOAT_DTYPES[dtype], shape) for name, shape in all_shapes(leaves).items()}


def host_tensors(
    leaves: list[Leaf], params: Any, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by name, cut out of the leaves as they come to the host one by one.

    Adapters are added to their weights in float32; int8 becomes the numbers that it stands for.
    """
    for leaf, node in zip(leaves, jax.tree.leaves(params, is_leaf=is_matrix), strict=True):
        array = whole_matrix(node) if is_matrix(node) else node
        if array.shape != leaf.spec.shape:
            raise ValueError(f"{leaf.path} has shape {array.shape}, expected {leaf.spec.shape}")
        host = to_host(array)
        for name, shape in leaf.tensor_shapes().items():
            out = np.empty(shape, host.dtype)
            for piece in leaf.pieces:
                if piece.tensor == name:
                    rows = host[piece.row : piece.row + piece.num_rows]
                    target = out.T if piece.transposed else out
                    target[piece.tensor_row : piece.tensor_row + piece.num_rows] = (
                        rows.reshape(target.shape) if piece.transposed else rows
                    )
            yield name, narrow(out, dtype, name)


copy = jax.jit(jnp.copy)
whole_matrix = jax.jit(lambda node: merged(node) if is_adapted(node) else widened(node))


def is_matrix(node: object) -> bool:
    """Whether a node of a tree is a matrix in several arrays: with an adapter, or in int8."""
    return is_adapted(node) or is_quantized(node)


def to_host(array: jax.Array) -> np.ndarray:
    """A whole parameter on the host.

    From a copy on the device: an array that was read once keeps its host copy as long as it lives,
    and the parameters outlive an export.
    """
    if array.is_fully_addressable:
        return np.asarray(copy(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def narrow(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The array in another dtype; ValueError where a finite value would become infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    lost = np.isinf(cast) & np.isfinite(array)
    if lost.any():
        largest = np.abs(array[lost].astype(np.float32)).max()
        raise ValueError(
            f"{name} has values up to {largest:.4g}, which {dtype} cannot hold: "
            "save as bfloat16 or float32"
        )
    return cast


def write_safetensors(
    stage: Path | None,
    entries: Entries,
    tensors: Iterator[tuple[str, np.ndarray]],
    limit: int,
) -> None:
    """One file, or shards of at most `limit` bytes with an index; nothing where `stage` is None."""
    if stage is None:
        for _ in tensors:  # the other processes still take part in bringing leaves together
            pass
        return
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in entries.items()}
    shards = list(split_shards(sizes, limit))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_SAFETENSORS
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        these = (next(tensors) for _ in names)
        write_file(stage / file, {name: entries[name] for name in names}, these)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(stage / f"{SINGLE_SAFETENSORS}.index.json", index)


@contextmanager
def staged(directory: Path) -> Iterator[Path | None]:
    """A directory beside `directory` to write into, moved to its place once all is written.

    None on every process but the first. Files of an earlier export are replaced; other files in
    `directory` stay.
    """
    if jax.process_index() != 0:
        yield None
    else:
        directory = directory.absolute()
        stage = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        kept = f"What {directory} held stays" if directory.exists() else ""
        try:
            with writing(f"{directory.name}/", directory.parent, kept):
                yield stage
                publish(stage, directory)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_hf")


def publish(stage: Path, directory: Path) -> None:
    """Move a finished directory to its place, config.json last where something is there."""
    if not directory.exists():
        os.rename(stage, directory)
        return
    written = sorted(stage.iterdir(), key=lambda path: path.name == "config.json")
    new = {path.name for path in written}
    # Beside a tokenizer without a template an older file would be its template.
    globs = (*WEIGHT_FILES, *["chat_template.jinja"] * ("tokenizer_config.json" in new))
    stale = [path for glob in globs for path in directory.glob(glob) if path.name not in new]
    for path in written:
        if (directory / path.name).is_dir():
            shutil.rmtree(directory / path.name)
        os.replace(path, directory / path.name)
    for path in set(stale):
        path.unlink()
