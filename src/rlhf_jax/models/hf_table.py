"""How a Hugging Face model family is described: a table of tensor names, and checked configs.

The table maps each leaf of `Params`, by its path, to the tensors that hold it. A path is the
attribute names joined by dots, with `*` for the number of a layer; `{n}` in a tensor's name is
that number. Names are those of the causal language model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_jax.models.config import ModelConfig

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The leaf is the tensor, row by row (`nn.Linear` and `nn.Embedding` store `[out, in]`)."""

    tensor: str


@dataclass(frozen=True)
class Columns:
    """The leaf is the tensor transposed: its rows are the tensor's columns."""

    tensor: str


@dataclass(frozen=True)
class Groups:
    """The leaf is, per KV group, rows of the group's query heads, of its key, of its value."""

    query: str
    key: str
    value: str


Source = Rows | Columns | Groups


@dataclass(frozen=True)
class Family:
    """Everything that makes a model type of Hugging Face one of ours.

    `body_prefixes` are what tensor names of the body may begin with in a checkpoint: first the
    causal model's (as in `table`), then those of other classes. `ignored` are regular expressions
    of tensors that hold nothing a model needs. `sizes` are configs of published models by name.
    """

    model_type: str
    causal_class: str
    classifier_class: str
    table: Mapping[str, Source]
    body_prefixes: tuple[str, ...]
    ignored: tuple[str, ...]
    config_from_hf: Callable[[HfConfig], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    sizes: Mapping[str, ModelConfig]


def norm_rows(leaf: str, tensor: str, *, bias: bool) -> dict[str, Source]:
    """Table rows of a norm."""
    rows: dict[str, Source] = {f"{leaf}.scale_D": Rows(f"{tensor}.weight")}
    if bias:
        rows[f"{leaf}.bias_D"] = Rows(f"{tensor}.bias")
    return rows


def require(hf: HfConfig, *keys: str) -> None:
    """ValueError where a config lacks sizes that have no default."""
    missing = [key for key in keys if hf.get(key) is None]
    if missing:
        raise ValueError(
            f"config.json of a {hf.get('model_type')} model lacks {', '.join(missing)}: "
            "it is not complete"
        )


def demand(hf: HfConfig, key: str, *allowed: Any) -> None:
    """ValueError unless a key is absent or has one of the values that the decoder computes."""
    value = hf.get(key, allowed[0])
    if value not in allowed:
        raise ValueError(
            f"config.json: {key}={value!r} is not supported for model_type "
            f"{hf.get('model_type')!r}: the decoder has {key} {' or '.join(map(repr, allowed))}"
        )


def demand_plain(hf: HfConfig) -> None:
    """ValueError for what no family here does: quantised, expert, soft-capped, scaled models."""
    for key in (
        "quantization_config",
        "num_experts",
        "num_local_experts",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "is_encoder_decoder",
        "add_cross_attention",
    ):
        demand(hf, key, None, False)
    demand(hf, "partial_rotary_factor", 1.0, None)


def head_size_of(hf: HfConfig) -> int:
    """`head_dim`, or the width divided by the heads."""
    if hf.get("head_dim") is not None:
        return hf["head_dim"]
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"config.json: hidden_size={width} does not divide over num_attention_heads={heads}"
        )
    return width // heads


def stop_ids(value: int | list[int] | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """`eos_token_id` as ModelConfig has it."""
    return tuple(value) if isinstance(value, list | tuple) else value


def token_ids(cfg: ModelConfig) -> dict[str, Any]:
    """The ids of special tokens as config.json has them."""
    eos = cfg.eos_token_id
    return {
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": cfg.pad_token_id,
    }
