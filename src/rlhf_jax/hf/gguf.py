"""GGUF files (llama.cpp's): their metadata as a config.json, their tensors under Hugging Face's
names. Nothing but the header is read here; `gguf_tensors` dequantises what is sliced.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax.hf.gguf_tensors import PLAIN, SUPPORTED, GGUFTensor

SUFFIX = ".gguf"
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2"}
"""`model_type` by `general.architecture`; Mistral's files say llama."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling of rotary positions, which no metadata describes."""


def is_gguf(path: Path) -> bool:
    """Whether a path is meant as a GGUF file."""
    return path.suffix == SUFFIX


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory; ValueError where it has several."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{directory} holds several GGUF files ({names}): name one of them")
    return files[0] if files else None


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file: metadata by key, and (type, shape, offset) of every tensor."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family; ValueError where it is not supported."""
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: general.architecture={name!r} is not supported: supported are "
                f"{', '.join(ARCHITECTURES)}"
            )
        return str(name)

    def of(self, key: str, default: Any = None) -> Any:
        """A value of the architecture: `of("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """The same; ValueError where the file has none."""
        value = self.of(key)
        if value is None:
            raise ValueError(f"{self.path} lacks {self.architecture}.{key}: it is not complete")
        if isinstance(value, list | tuple):
            raise ValueError(
                f"{self.path}: {self.architecture}.{key} has a value for each layer: models whose "
                "layers differ are not supported"
            )
        return value

    def kv_heads(self) -> int:
        """Key and value heads; as many as query heads where the file does not say."""
        key = "attention.head_count"
        return int(self.need(key if self.of(f"{key}_kv") is None else f"{key}_kv"))


def open_gguf(path: Path) -> GGUFFile:
    """The header of a file, read once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, one of several parts, or the package `gguf` is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    status = path.stat()
    return _open(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _open(path: Path, changed: int, size: int) -> GGUFFile:
    del changed, size
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            f"{path}: reading GGUF needs the package gguf: pip install 'rlhf-jax[gguf]'"
        ) from error

    class Reader(GGUFReader):
        """Slices of a memmap are memmaps, which takes three times as long as plain arrays."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    try:
        reader = Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path} is one of {metadata['split.count']} parts: merge them first "
            "(llama-gguf-split --merge)"
        )
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.data_offset),
        )
        for tensor in reader.tensors
    }
    return GGUFFile(path, metadata, tensors)


def read_tensors(file: GGUFFile) -> dict[str, GGUFTensor]:
    """The tensors under Hugging Face's names; ValueError names those that cannot be read."""
    unsupported = [
        f"{name} ({kind})"
        for name, (kind, shape, _) in file.tensors.items()
        if kind not in SUPPORTED or (kind not in PLAIN and len(shape) != 2)
    ]
    if unsupported:
        more = f" and {len(unsupported) - 3} more" if len(unsupported) > 3 else ""
        raise ValueError(
            f"{file.path}: {', '.join(unsupported[:3])}{more} cannot be read: supported types are "
            f"{', '.join(SUPPORTED)}"
        )
    return {hf_name(name): tensor_of(file, name) for name in file.tensors if name != ROPE_FACTORS}


def tensor_of(file: GGUFFile, name: str) -> GGUFTensor:
    """A tensor by its name in the file."""
    kind, shape, offset = file.tensors[name]
    dtype = PLAIN.get(kind, np.dtype(np.float32))
    heads = heads_of(file).get(name.split(".")[-2], 0)
    return GGUFTensor(file.path, dtype, shape, offset, kind=kind, num_heads=heads)


def heads_of(file: GGUFFile) -> dict[str, int]:
    """Heads of the matrices whose rows llama.cpp reorders: Llama's queries and keys."""
    if file.architecture != "llama":
        return {}
    heads = int(file.need("attention.head_count"))
    return {"attn_q": heads, "attn_k": file.kv_heads()}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`; others as they are."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is not None:
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{LAYER_NAMES.get(part, part)}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{NAMES.get(part, part)}.{kind}"


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """What the model's config.json says; ValueError where the file lacks a size."""
    heads = int(file.need("attention.head_count"))
    width = int(file.need("embedding_length"))
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{file.path} has no token_embd.weight: it holds no language model")
    experts = file.of("expert_count")
    biased = "blk.0.attn_q.bias" in tensors and file.architecture == "llama"
    return {
        "model_type": ARCHITECTURES[file.architecture],
        "vocab_size": tensors["token_embd.weight"][1][0],
        "hidden_size": width,
        "intermediate_size": int(file.need("feed_forward_length")),
        "num_hidden_layers": int(file.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": file.kv_heads(),
        "head_dim": head_size(file, width // heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(file.need("context_length")),
        "rms_norm_eps": float(file.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope_parameters(file),
        **({"attention_bias": True} if biased else {}),
        **({"num_local_experts": experts} if experts else {}),
        **token_ids(file),
    }


def head_size(file: GGUFFile, default: int) -> int:
    """The size of a head; ValueError where keys, values and rotations do not agree on it."""
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    size = int(file.of(keys[0], default))
    for key in keys[1:]:
        if int(file.of(key, size)) != size:
            raise ValueError(
                f"{file.path}: {file.architecture}.{key}={file.of(key)} is not supported: heads "
                f"have {size} dimensions, and all of them are rotated"
            )
    return size


def rope_parameters(file: GGUFFile) -> dict[str, Any]:
    """Base and scaling of rotary positions in config.json's terms."""
    theta = float(file.of("rope.freq_base", 10000.0))
    # Without a type llama.cpp scales linearly, by either key.
    factor = file.of("rope.scaling.factor", file.of("rope.scale_linear", 1.0))
    kind = file.of("rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind != "none":
        return {"rope_theta": theta, "rope_type": kind}
    if ROPE_FACTORS not in file.tensors:
        return {"rope_theta": theta, "rope_type": "default"}
    factors = np.asarray(tensor_of(file, ROPE_FACTORS).view(), np.float32)
    scaling = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    if not np.allclose(factors, llama3_factors(theta, 2 * len(factors), **scaling), rtol=1e-3):
        raise ValueError(
            f"{file.path}: the factors in {ROPE_FACTORS} are not those of Llama 3, the only ones "
            "that are supported"
        )
    return {"rope_theta": theta, "rope_type": "llama3", **scaling}


def llama3_factors(
    theta: float, head: int, *, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:  # fmt: skip
    """What Llama 3 divides each rotary frequency by: 1 for fast ones, `factor` for slow ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head, 2) / head)
    turns = original_max_position_embeddings / wavelengths
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """Special tokens by number; a token that ends a turn is one that ends a text."""
    told = {
        name: file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "padding", "eot")
    }
    ends = dict.fromkeys(n for n in (told["eos"], told["eot"]) if n is not None)
    eos = next(iter(ends), None) if len(ends) < 2 else list(ends)
    return {
        "bos_token_id": told["bos"],
        "eos_token_id": eos,
        "pad_token_id": told["padding"],
    }
