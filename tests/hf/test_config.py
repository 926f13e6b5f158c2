"""Configs of the families: published sizes, old and new keys, and what is refused by name."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config

from rlhf_jax.hf.config_io import load_config
from rlhf_jax.models.config import RopeScaling
from rlhf_jax.models.families import FAMILIES, SIZES, config_from_hf, config_to_hf

LLAMA = LlamaConfig(intermediate_size=100, num_hidden_layers=2).to_dict()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("facebook/opt-125m", 0.125),
        ("facebook/opt-350m", 0.331),
        ("facebook/opt-1.3b", 1.316),
        ("facebook/opt-2.7b", 2.652),
        ("facebook/opt-6.7b", 6.658),
        ("facebook/opt-13b", 12.853),
        ("facebook/opt-30b", 29.975),
        ("facebook/opt-66b", 65.716),
        ("facebook/opt-175b", 174.6),
        ("meta-llama/Llama-2-7b-hf", 6.738),
        ("meta-llama/Llama-2-13b-hf", 13.016),
        ("meta-llama/Llama-2-70b-hf", 68.977),
        ("meta-llama/Llama-3.1-8B", 8.030),
        ("meta-llama/Llama-3.2-1B", 1.236),
        ("mistralai/Mistral-7B-v0.1", 7.242),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
        ("HuggingFaceTB/SmolLM2-1.7B", 1.711),
        ("Qwen/Qwen2.5-0.5B", 0.494),
        ("Qwen/Qwen2.5-1.5B", 1.544),
    ],
)
def test_published_sizes_have_their_published_number_of_parameters(name, billions):
    assert SIZES[name].num_params() / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("name", SIZES)
def test_configs_survive_the_way_to_hugging_face_and_back(name):
    cfg = SIZES[name]
    hf = config_to_hf(cfg)
    assert config_from_hf(hf) == cfg
    assert config_from_hf(json.loads(json.dumps(hf))) == cfg
    read = AutoConfig.for_model(**hf)
    assert config_from_hf(read.to_dict()) == cfg


@pytest.mark.parametrize("make", [OPTConfig, LlamaConfig, MistralConfig, Qwen2Config])
def test_absent_keys_have_transformers_defaults(make):
    whole = make().to_dict()
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    needed = {key: whole[key] for key in (*sizes, "model_type")}
    for key in ("ffn_dim", "intermediate_size"):
        if key in whole:
            needed[key] = whole[key]
    assert config_from_hf(needed) == config_from_hf(whole)


def test_rope_keys_from_before_transformers_5_mean_the_same():
    plain = {k: v for k, v in LLAMA.items() if k != "rope_parameters"}
    new = plain | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    old = plain | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    older = plain | {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    cfg = config_from_hf(new)
    assert cfg.rope_theta == 5e5
    assert cfg.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config_from_hf(old) == cfg == config_from_hf(older)
    unscaled = config_from_hf(plain | {"rope_theta": 3e4, "rope_scaling": None})
    assert (unscaled.rope_theta, unscaled.rope_scaling) == (3e4, None)


def test_real_configs_are_read(shared_data):
    cfg = load_config(shared_data("smollm2-135m-instruct"))
    want = replace(SIZES["HuggingFaceTB/SmolLM2-135M"], bos_token_id=1, eos_token_id=2)
    assert replace(cfg, norm_eps=1e-5, pad_token_id=None) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_size": None}, "lacks hidden_size"),
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported: .*llama, .*opt",
        ),
        ({"hidden_size": 100, "num_attention_heads": 7, "head_dim": None}, "does not divide"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_key_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False"),
    ],
)
def test_opt_variants_without_a_switch_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(OPTConfig().to_dict() | change)


def test_the_directory_is_named_and_generation_stop_ids_win(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_config(tmp_path).stop_ids == (2, 7)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=f"{tmp_path}: .*'bert' is not supported"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_config(tmp_path)


def test_every_family_names_a_class_of_transformers():
    transformers = pytest.importorskip("transformers")
    for family in FAMILIES.values():
        assert hasattr(transformers, family.causal_class)
        assert hasattr(transformers, family.classifier_class)
