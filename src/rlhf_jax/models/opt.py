"""OPT, 125M to 175B parameters (Zhang et al. 2022), and what shares its Hugging Face class.

OPT-350M differs: norms after the sums, no final norm, and embeddings of width 512 projected to
the model's 1024. Dropout in a config is a habit of training, not part of the model: it is carried
over to exports and never applied.
"""

from typing import Any

from rlhf_jax.models.config import ModelConfig
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

POSITION_OFFSET = 2
"""The position table starts with two rows that no position reads (fairseq's padding)."""

TABLE: dict[str, Source] = {
    "embed_VW": Rows("model.decoder.embed_tokens.weight"),
    "positions_PD": Rows("model.decoder.embed_positions.weight"),
    "project_in_DW": Rows("model.decoder.project_in.weight"),
    "project_out_WD": Rows("model.decoder.project_out.weight"),
    **norm_rows(
        "layers.*.attention_norm", "model.decoder.layers.{n}.self_attn_layer_norm", bias=True
    ),
    "layers.*.qkv_ED": Groups(
        "model.decoder.layers.{n}.self_attn.q_proj.weight",
        "model.decoder.layers.{n}.self_attn.k_proj.weight",
        "model.decoder.layers.{n}.self_attn.v_proj.weight",
    ),
    "layers.*.qkv_bias_E": Groups(
        "model.decoder.layers.{n}.self_attn.q_proj.bias",
        "model.decoder.layers.{n}.self_attn.k_proj.bias",
        "model.decoder.layers.{n}.self_attn.v_proj.bias",
    ),
    "layers.*.out_ED": Columns("model.decoder.layers.{n}.self_attn.out_proj.weight"),
    "layers.*.out_bias_D": Rows("model.decoder.layers.{n}.self_attn.out_proj.bias"),
    **norm_rows("layers.*.mlp_norm", "model.decoder.layers.{n}.final_layer_norm", bias=True),
    "layers.*.up_FD": Rows("model.decoder.layers.{n}.fc1.weight"),
    "layers.*.up_bias_F": Rows("model.decoder.layers.{n}.fc1.bias"),
    "layers.*.down_FD": Columns("model.decoder.layers.{n}.fc2.weight"),
    "layers.*.down_bias_D": Rows("model.decoder.layers.{n}.fc2.bias"),
    **norm_rows("final_norm", "model.decoder.final_layer_norm", bias=True),
    "unembed_VW": Rows("lm_head.weight"),
}


def config_from_hf(hf: HfConfig) -> ModelConfig:
    """ModelConfig of an OPT config.json; ValueError names a key and value it has no switch for."""
    require(hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")
    demand_plain(hf)
    demand(hf, "activation_function", "relu", "gelu")
    demand(hf, "layer_norm_elementwise_affine", True)
    bias, before = hf.get("enable_bias", True), hf.get("do_layer_norm_before", True)
    return ModelConfig(
        family="opt",
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_attention_heads"],
        head_size=head_size_of(hf),
        mlp_width=hf["ffn_dim"],
        max_positions=hf.get("max_position_embeddings", 2048),
        positions="learned",
        position_offset=POSITION_OFFSET,
        norm="layer_norm",
        activation=hf.get("activation_function", "relu"),
        embed_width=hf.get("word_embed_proj_dim") or hf["hidden_size"],
        pre_norm=before,
        final_norm=before and not hf.get("_remove_final_layer_norm", False),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tie_embeddings=hf.get("tie_word_embeddings", True),
        init_std=hf.get("init_std", 0.02),
        bos_token_id=hf.get("bos_token_id", 2),
        eos_token_id=stop_ids(hf.get("eos_token_id", 2)),
        pad_token_id=hf.get("pad_token_id", 1),
    )


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of an OPT config.json that a ModelConfig determines."""
    return {
        "model_type": "opt",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "ffn_dim": cfg.mlp_width,
        "max_position_embeddings": cfg.max_positions,
        "activation_function": cfg.activation,
        "word_embed_proj_dim": cfg.embed_width,
        "do_layer_norm_before": cfg.pre_norm,
        "_remove_final_layer_norm": cfg.pre_norm and not cfg.final_norm,
        "enable_bias": cfg.attention_bias,
        "tie_word_embeddings": cfg.tie_embeddings,
        "init_std": cfg.init_std,
        **token_ids(cfg),
    }


def size(width: int, num_layers: int, num_heads: int, **changes: Any) -> ModelConfig:
    """A published size; OPT's feed-forward is four times as wide as the model."""
    hf = {
        "vocab_size": 50272,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "ffn_dim": 4 * width,
    }
    return config_from_hf(hf | changes)


SIZES: dict[str, ModelConfig] = {
    "facebook/opt-125m": size(768, 12, 12),
    "facebook/opt-350m": size(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": size(2048, 24, 32),
    "facebook/opt-2.7b": size(2560, 32, 32),
    "facebook/opt-6.7b": size(4096, 32, 32),
    "facebook/opt-13b": size(5120, 40, 40),
    "facebook/opt-30b": size(7168, 48, 56),
    "facebook/opt-66b": size(9216, 64, 72),
    "facebook/opt-175b": size(12288, 96, 96),
}

OPT = Family(
    model_type="opt",
    causal_class="OPTForCausalLM",
    classifier_class="OPTForSequenceClassification",
    table=TABLE,
    body_prefixes=("model.decoder.", "decoder.", "rwtransformer.decoder."),
    ignored=(r"(model\.|rwtransformer\.)?decoder\.version",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    sizes=SIZES,
)
