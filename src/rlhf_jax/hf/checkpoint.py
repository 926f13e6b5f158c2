"""The weights of a Hugging Face directory: which files hold them, and which tensors are in them."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_jax.hf.gguf import is_gguf, open_gguf, read_tensors
from rlhf_jax.hf.pickle_reader import read_pickle
from rlhf_jax.hf.safetensors_io import read_header
from rlhf_jax.hf.tensors import StoredTensor

log = logging.getLogger(__name__)

SINGLE_SAFETENSORS, SINGLE_PICKLE = "model.safetensors", "pytorch_model.bin"
FORMATS: tuple[tuple[str, Callable[[Path], dict[str, StoredTensor]]], ...] = (
    (SINGLE_SAFETENSORS, read_header),
    (SINGLE_PICKLE, read_pickle),
)
"""In order of preference, as in transformers; `<name>.index.json` says how a model is split."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a directory by name; nothing but headers has been read."""

    source: Path
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(directory: Path) -> Checkpoint:
    """The weights in a directory or GGUF file.

    FileNotFoundError where there are none or a shard is missing; ValueError where a file is
    damaged, or the index and the files disagree.
    """
    if is_gguf(directory):
        return Checkpoint(directory, read_tensors(open_gguf(directory)))
    for name, read in FORMATS:
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return Checkpoint(directory / name, read(directory / name))
        if index.is_file():
            return Checkpoint(index, read_shards(index, read))
    there = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
    names = ", ".join(name for name, _ in FORMATS)
    raise FileNotFoundError(
        f"{directory} has no weights: expected {names} or one of these with .index.json, "
        f"found {there}"
    )


def read_shards(
    index: Path, read: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """The tensors of all files that an index names."""
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index} is damaged: it has no weight_map") from error
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        file = index.parent / shard
        if not file.is_file():
            held = [name for name, where in weight_map.items() if where == shard]
            raise FileNotFoundError(
                f"{index} names {shard}, which is missing; it holds {shorten(held)}"
            )
        found = read(file)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise ValueError(f"{shorten(twice)}: in {tensors[twice[0]].file.name} and in {shard}")
        tensors |= found
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise ValueError(f"{index} names {shorten(lost)}, which no file of it holds")
    return tensors


def shorten(names: list[str], limit: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
