"""Writes GGUF files as llama.cpp's converter does: its names, and its order of rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from rlhf_jax.hf.safetensors_io import read_header

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def llama_cpp_name(name: str) -> str:
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def llama_cpp_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def write(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
) -> Path:
    """A file of metadata (`rope.freq_base` is the architecture's) and stored tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        name = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a config.json."""
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": hf["rope_parameters"]["rope_theta"],
        "rope.dimension_count": head,
        "attention.key_length": head,
        "attention.value_length": head,
    }


def model_tensors(directory: Path, hf: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, Kind]]:
    """The tensors of a directory as float32, named and ordered as llama.cpp has them."""
    heads = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}
    found: dict[str, tuple[np.ndarray, Kind]] = {}
    for name, tensor in read_header(directory / "model.safetensors").items():
        array = np.ascontiguousarray(tensor.view(), np.float32)
        part = name.split(".")[-2]
        if part in heads and hf["model_type"] == "llama":
            array = llama_cpp_rows(array, heads[part])
        found[llama_cpp_name(name)] = array, Kind.F32
    return found


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!,.-+*/:;<>=?'()ĠĊ@#$"


def letters_model(path: Path, directory: Path) -> Path:
    """A golden Llama with a tokenizer: byte-level BPE without merges, so a letter is a token."""
    hf = json.loads((directory / "config.json").read_text())
    tokens = ["<pad>", "<s>", "</s>", *LETTERS]
    values = {
        "padding_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True,
        "model": "gpt2", "pre": "gpt-2", "merges": [], "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * len(LETTERS),
    }  # fmt: skip
    named = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return write(path, "llama", metadata(hf) | named, model_tensors(directory, hf))
