"""Llama 2 and 3, SmolLM2 (`model_type` llama), Mistral, Qwen2 and Qwen2.5.

Attention dropout and `pretraining_tp` in a config change how a model trains or is cut, not what
it computes: they are carried over to exports and never applied.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhf_jax.models.config import ModelConfig, RopeScaling
from rlhf_jax.models.hf_table import (
    Columns,
    Family,
    Groups,
    HfConfig,
    Rows,
    Source,
    demand,
    demand_plain,
    head_size_of,
    norm_rows,
    require,
    stop_ids,
    token_ids,
)

TABLE: dict[str, Source] = {
    "embed_VW": Rows("model.embed_tokens.weight"),
    **norm_rows("layers.*.attention_norm", "model.layers.{n}.input_layernorm", bias=False),
    "layers.*.qkv_ED": Groups(
        "model.layers.{n}.self_attn.q_proj.weight",
        "model.layers.{n}.self_attn.k_proj.weight",
        "model.layers.{n}.self_attn.v_proj.weight",
    ),
    "layers.*.qkv_bias_E": Groups(
        "model.layers.{n}.self_attn.q_proj.bias",
        "model.layers.{n}.self_attn.k_proj.bias",
        "model.layers.{n}.self_attn.v_proj.bias",
    ),
    "layers.*.out_ED": Columns("model.layers.{n}.self_attn.o_proj.weight"),
    "layers.*.out_bias_D": Rows("model.layers.{n}.self_attn.o_proj.bias"),
    **norm_rows("layers.*.mlp_norm", "model.layers.{n}.post_attention_layernorm", bias=False),
    "layers.*.gate_FD": Rows("model.layers.{n}.mlp.gate_proj.weight"),
    "layers.*.up_FD": Rows("model.layers.{n}.mlp.up_proj.weight"),
    "layers.*.down_FD": Columns("model.layers.{n}.mlp.down_proj.weight"),
    **norm_rows("final_norm", "model.norm", bias=False),
    "unembed_VW": Rows("lm_head.weight"),
}


LLAMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_DEFAULTS,
    "mistral": LLAMA_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
"""What transformers takes for keys that a config.json lacks, by `model_type`."""


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """ModelConfig of a Llama, Mistral or Qwen2 config.json.

    ValueError names a key and value that the decoder has no switch for.
    """
    require(hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    require(hf, "intermediate_size")
    model_type = hf["model_type"]
    hf = {**DEFAULTS[model_type], **hf}
    window = check_switches(hf)
    theta, scaling = rope_from_hf(hf)
    return ModelConfig(
        family=model_type,
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"] or hf["num_attention_heads"],
        head_size=head_size_of(hf),
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        positions="rope",
        norm="rms_norm",
        norm_eps=hf["rms_norm_eps"],
        activation="silu_gated",
        embed_width=hf["hidden_size"],
        # Qwen2 has biases on queries, keys and values alone, and no key that says so.
        attention_bias=hf["attention_bias"] or model_type == "qwen2",
        output_bias=hf["attention_bias"],
        mlp_bias=False,
        tie_embeddings=hf["tie_word_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        init_std=hf["initializer_range"],
        bos_token_id=hf["bos_token_id"],
        eos_token_id=stop_ids(hf["eos_token_id"]),
        pad_token_id=hf["pad_token_id"],
    )


def check_switches(hf: HfConfig) -> int | None:
    """The sliding window of every layer; ValueError for what the decoder does not do."""
    demand_plain(hf)
    demand(hf, "hidden_act", "silu", "swish")
    demand(hf, "mlp_bias", False)
    window = hf["sliding_window"]
    if hf["model_type"] == "llama":
        demand(hf, "sliding_window", None)
    else:
        demand(hf, "attention_bias", False)
    if hf["model_type"] == "qwen2":
        demand(hf, "use_sliding_window", False)
        window = None
    demand_equal_layers(hf, "full_attention" if window is None else "sliding_attention")
    return window


def demand_equal_layers(hf: HfConfig, allowed: str) -> None:
    """ValueError where `layer_types` mixes kinds of attention."""
    types = sorted(set(hf.get("layer_types") or [allowed]))
    if types != [allowed]:
        raise ValueError(
            f"config.json: layer_types={types} is not supported for model_type "
            f"{hf['model_type']!r}: every layer must be {allowed!r}"
        )


def rope_from_hf(hf: HfConfig) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions.

    Read from `rope_parameters`, or from `rope_scaling` and `rope_theta` of configs written before
    transformers 5 (which win where both are there, as in transformers).
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    demand({**rope, "model_type": hf["model_type"]}, "partial_rotary_factor", 1.0, None)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported: the decoder has rotary positions "
            "of rope_type 'default' and 'llama3'"
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [key for key in needed if key not in rope]
    if missing:
        raise ValueError(f"config.json: rope_type='llama3' lacks {', '.join(missing)}")
    original = rope.get("original_max_position_embeddings", hf["max_position_embeddings"])
    factor, low, high = (rope[key] for key in needed)
    return theta, RopeScaling(factor, low, high, original)


def rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Rotary positions in the keys of transformers 5 and in the older ones."""
    scaling = cfg.rope_scaling
    kind: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        kind = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "rope_parameters": {"rope_theta": cfg.rope_theta, **kind},
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None if scaling is None else kind,
    }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of a Llama, Mistral or Qwen2 config.json that a ModelConfig determines."""
    own: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": cfg.output_bias, "mlp_bias": False},
        "mistral": {"sliding_window": cfg.sliding_window},
        "qwen2": {"use_sliding_window": False},
    }
    return {
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp_width,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        **own[cfg.family],
        **rope_to_hf(cfg),
        **token_ids(cfg),
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def size(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **changes: Any
) -> ModelConfig:
    """A published size; `changes` are keys of its config.json."""
    hf = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "rms_norm_eps": 1e-5,
    }
    return config_from_hf(hf | changes)


llama2 = partial(size, vocab=32000, max_position_embeddings=4096)
llama3 = partial(size, vocab=128256, rope_theta=500000.0, bos_token_id=128000, eos_token_id=128001)
smollm2 = partial(
    size,
    vocab=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    rope_theta=100000.0,
    bos_token_id=0,
    eos_token_id=0,
)
mistral = partial(size, model_type="mistral", max_position_embeddings=32768)

LLAMA_SIZES: dict[str, ModelConfig] = {
    "meta-llama/Llama-2-7b-hf": llama2(4096, 32, 32, 32, 11008),
    "meta-llama/Llama-2-13b-hf": llama2(5120, 40, 40, 40, 13824),
    "meta-llama/Llama-2-70b-hf": llama2(8192, 80, 64, 8, 28672),
    "meta-llama/Meta-Llama-3-8B": llama3(4096, 32, 32, 8, 14336, max_position_embeddings=8192),
    "meta-llama/Llama-3.1-8B": llama3(
        4096, 32, 32, 8, 14336, max_position_embeddings=131072, rope_scaling=LLAMA3_ROPE
    ),
    "meta-llama/Llama-3.2-1B": llama3(
        2048,
        16,
        32,
        8,
        8192,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        rope_scaling=LLAMA3_ROPE | {"factor": 32.0},
    ),
    "HuggingFaceTB/SmolLM2-135M": smollm2(576, 30, 9, 3, 1536),
    "HuggingFaceTB/SmolLM2-135M-Instruct": smollm2(
        576, 30, 9, 3, 1536, bos_token_id=1, eos_token_id=2
    ),
    "HuggingFaceTB/SmolLM2-360M": smollm2(960, 32, 15, 5, 2560),
    "HuggingFaceTB/SmolLM2-1.7B": smollm2(2048, 24, 32, 32, 8192, rope_theta=130000.0),
}

MISTRAL_SIZES: dict[str, ModelConfig] = {
    "mistralai/Mistral-7B-v0.1": mistral(4096, 32, 32, 8, 14336, 32000, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": mistral(
        4096, 32, 32, 8, 14336, 32768, sliding_window=None, rope_theta=1000000.0
    ),
}


qwen2 = partial(
    size,
    model_type="qwen2",
    vocab=151936,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151643,
)

QWEN2_SIZES: dict[str, ModelConfig] = {
    "Qwen/Qwen2.5-0.5B": qwen2(896, 24, 14, 2, 4864),
    "Qwen/Qwen2.5-1.5B": qwen2(1536, 28, 12, 2, 8960, max_position_embeddings=131072),
}


def make_family(model_type: str, class_prefix: str, sizes: Mapping[str, ModelConfig]) -> Family:
    """A family with Llama's tensor names."""
    read: Callable[[HfConfig], ModelConfig] = config_from_hf
    return Family(
        model_type=model_type,
        causal_class=f"{class_prefix}ForCausalLM",
        classifier_class=f"{class_prefix}ForSequenceClassification",
        table=TABLE,
        body_prefixes=("model.", "", "rwtransformer."),
        ignored=(r"(.*\.)?rotary_emb\.inv_freq",),
        config_from_hf=read,
        config_to_hf=config_to_hf,
        sizes=sizes,
    )


LLAMA = make_family("llama", "Llama", LLAMA_SIZES)
MISTRAL = make_family("mistral", "Mistral", MISTRAL_SIZES)
QWEN2 = make_family("qwen2", "Qwen2", QWEN2_SIZES)
