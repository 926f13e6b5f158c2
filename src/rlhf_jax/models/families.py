"""The model families, by Hugging Face `model_type`. A new family is a table, a config and a row."""

from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.hf_table import Family, HfConfig
from rlhf_jax.models.llama import LLAMA, MISTRAL, QWEN2
from rlhf_jax.models.opt import OPT

FAMILIES: dict[str, Family] = {family.model_type: family for family in (OPT, LLAMA, MISTRAL, QWEN2)}

SIZES: dict[str, ModelConfig] = {
    name: cfg for family in FAMILIES.values() for name, cfg in family.sizes.items()
}
"""Configs of published models by their names on the Hugging Face Hub."""


def find_family(model_type: str | None) -> Family:
    """The family of a `model_type`; ValueError lists those that are supported."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {model_type!r} is not supported: "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """ModelConfig of a config.json; ValueError names a key and value that is not supported."""
    return find_family(hf.get("model_type")).config_from_hf(hf)


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that a ModelConfig determines."""
    return find_family(cfg.family).config_to_hf(cfg)
