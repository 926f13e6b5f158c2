"""config.json and generation_config.json of a Hugging Face directory."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_jax.hf.gguf import hf_config, is_gguf, open_gguf
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import config_from_hf, config_to_hf
from rlhf_jax.models.hf_table import stop_ids, token_ids


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; FileNotFoundError or ValueError names the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {file.parent} is not a Hugging Face model")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def read_source_config(directory: Path) -> dict[str, Any]:
    """config.json as it stands (of a GGUF file: what it would say), which exports carry over."""
    if is_gguf(directory):
        return hf_config(open_gguf(directory))
    return read_json(directory / "config.json")


def load_config(directory: Path, *, scalar: bool = False) -> ModelConfig:
    """ModelConfig of a Hugging Face directory or GGUF file; with `scalar` of a reward model.

    A scalar model has no unembedding, so its config says tied whatever the language model had.

    Stop ids are those of generation_config.json where it has any, as in transformers' generate:
    chat models list more there. Raises ValueError with key and value for what is not supported.
    """
    source = read_source_config(directory)
    try:
        cfg = config_from_hf(source)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    if scalar:
        cfg = replace(cfg, tie_embeddings=True)
    generation = directory / "generation_config.json"
    if not generation.is_file():
        return cfg
    eos = read_json(generation).get("eos_token_id")
    return cfg if eos is None else replace(cfg, eos_token_id=stop_ids(eos))


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """A JSON object as a file, keys in order."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def export_config(
    cfg: ModelConfig, dtype: str, architecture: str, source_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """config.json of an export: every key of the source, and what the model determines.

    The dtype stands under transformers 5's key and under the older one.
    """
    source = dict(source_config or {})
    if source.get("model_type", cfg.family) != cfg.family:
        raise ValueError(
            f"the source config has model_type {source['model_type']!r}, "
            f"the model is of family {cfg.family!r}"
        )
    own = {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    return source | config_to_hf(cfg) | own


def classifier_config() -> dict[str, Any]:
    """What makes a config.json one of a sequence classifier with one score."""
    return {
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "problem_type": "regression",
    }


def generation_config(cfg: ModelConfig) -> dict[str, Any]:
    """generation_config.json: where generation starts and stops."""
    return {key: value for key, value in token_ids(cfg).items() if value is not None}
