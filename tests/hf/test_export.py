"""Exports: a round trip gives the same tensors and keys, and transformers reads the rest."""

import json
import tracemalloc
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from rlhf_jax.data.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_ROWS, byte_tokenizer
from rlhf_jax.hf.checkpoint import open_checkpoint
from rlhf_jax.hf.config_io import load_config, read_source_config
from rlhf_jax.hf.export import save_hf, save_reward_hf
from rlhf_jax.hf.tokenizer import choose_pad_id
from rlhf_jax.models.params import init_params, param_specs

MODELS = ["opt", "opt_post_norm", "llama", "llama3_rope", "mistral", "qwen2"]
SCORERS = ["opt_scorer", "opt_post_norm_scorer", "llama_scorer"]


def tensors_of(directory):
    found = open_checkpoint(directory).tensors
    return {name: np.array(tensor.view()) for name, tensor in found.items()}


def assert_same_tensors(one, other):
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_gives_the_same_tensors_and_carries_every_key(
    name, mesh, golden, load, tmp_path
):
    params, cfg, _ = load(golden(name), mesh)
    source = read_source_config(golden(name)) | {"a_key_of_its_own": [1, 2]}
    save_hf(tmp_path / "out", params, cfg, "float32", source_config=source)
    assert_same_tensors(tmp_path / "out", golden(name))
    written = read_source_config(tmp_path / "out")
    assert {key: written[key] for key in source} == source
    assert load_config(tmp_path / "out") == cfg


def test_a_round_trip_in_float16_gives_the_same_tensors(golden, load, tmp_path):
    params, cfg, _ = load(golden("opt_bin"))
    save_hf(tmp_path / "out", params, cfg, "float16")
    want = tensors_of(golden("opt_bin"))
    del want["lm_head.weight"]  # tied: PyTorch's format keeps the name, safetensors does not
    ours = tensors_of(tmp_path / "out")
    assert ours.keys() == want.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, want[name])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_exported_config(name, golden, load, tmp_path):
    params, cfg, _ = load(golden(name))
    save_hf(tmp_path / "out", params, cfg, "bfloat16")
    ours, theirs = (
        AutoConfig.from_pretrained(directory).to_dict()
        for directory in (tmp_path / "out", golden(name))
    )
    assert str(ours["dtype"]).endswith("bfloat16")
    # Where a config lies is no part of it; the rope keys are for readers before transformers 5.
    apart = {"dtype", "_name_or_path", "rope_theta", "rope_scaling"}
    if name == "qwen2":
        apart.add("head_dim")  # transformers knows the key but has no default to show
    assert {key: ours[key] for key in ours.keys() - apart} == {
        key: theirs[key] for key in theirs.keys() - apart
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == cfg.eos_token_id


def test_shards_have_an_index_and_load_again(golden, load, same_trees, tmp_path):
    params, cfg, _ = load(golden("llama"))
    save_hf(tmp_path / "out", params, cfg, "float32", max_shard_bytes=50_000)
    shards = sorted(tmp_path.glob("out/model-*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert all(shard.stat().st_size < 60_000 for shard in shards)
    same_trees(load(tmp_path / "out", "8x1")[0], params)


@pytest.mark.parametrize("kind", ["sequence_classification", "deepspeed_chat"])
@pytest.mark.parametrize("name", SCORERS)
def test_reward_models_come_back_from_both_formats(name, kind, golden, load, same_trees, tmp_path):
    model, cfg, _ = load(golden(name), "8x1", scalar=True)
    save_reward_hf(tmp_path / "out", model, cfg, "float32", kind=kind)
    same_trees(load(tmp_path / "out", scalar=True)[0], model)
    if kind == "sequence_classification":
        assert_same_tensors(tmp_path / "out", golden(name))
        assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == 1
    else:
        names = open_checkpoint(tmp_path / "out").tensors
        assert (tmp_path / "out" / "pytorch_model.bin").is_file()
        assert "v_head.weight" in names
        assert all(key.startswith("rwtransformer.") or key == "v_head.weight" for key in names)


def test_a_reward_model_never_pads_with_its_stop_id(golden, load, tmp_path):
    model, cfg, _ = load(golden("opt_scorer"), scalar=True)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    wide = replace(cfg, eos_token_id=EOS_ID, pad_token_id=EOS_ID, vocab_size=VOCAB_ROWS)
    assert choose_pad_id(wide, tokenizer) not in (EOS_ID,)
    aliased = replace(cfg, pad_token_id=cfg.eos_token_id)
    save_reward_hf(tmp_path / "out", model, aliased, "float32")
    written = read_source_config(tmp_path / "out")
    assert written["pad_token_id"] != written["eos_token_id"]
    assert 0 <= written["pad_token_id"] < cfg.vocab_size


def test_the_exported_tokenizer_pads_with_the_configs_pad_id(tmp_path, load, golden):
    model, cfg, _ = load(golden("opt_scorer"), scalar=True)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    cfg = replace(cfg, pad_token_id=EOS_ID, eos_token_id=EOS_ID)
    save_reward_hf(tmp_path / "out", model, cfg, "float32", tokenizer)
    written = read_source_config(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == written["pad_token_id"]
    assert tokenizer.pad_token_id == EOS_ID  # the caller's own is left alone


def test_a_tokenizer_is_exported_beside_the_weights(golden, load, tmp_path):
    params, cfg, _ = load(golden("opt"))
    save_hf(tmp_path / "out", params, cfg, "float32", byte_tokenizer())
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("hé")["input_ids"] == byte_tokenizer()("hé")["input_ids"]
    assert again.pad_token_id == PAD_ID


def test_a_value_that_the_dtype_cannot_hold_is_an_error(golden, load, tmp_path):
    params, cfg, _ = load(golden("opt"))
    params.layers[0] = replace(params.layers[0], up_bias_F=params.layers[0].up_bias_F + 1e5)
    with pytest.raises(ValueError, match=r"fc1\.bias has values up to 1e\+05.*bfloat16"):
        save_hf(tmp_path / "out", params, cfg, "float16")
    assert not list(tmp_path.iterdir())  # neither a directory nor a part of one


def test_an_export_replaces_an_earlier_one_and_leaves_other_files(golden, load, tmp_path):
    params, cfg, _ = load(golden("llama"))
    out = tmp_path / "out"
    save_hf(out, params, cfg, "float32", max_shard_bytes=50_000)
    (out / "notes.txt").write_text("mine")
    save_hf(out, params, cfg, "float32")
    assert not list(out.glob("model-*"))
    assert not list(out.glob("*.index.json"))
    assert (out / "notes.txt").read_text() == "mine"
    assert_same_tensors(out, golden("llama"))


def test_one_leaf_at_a_time_comes_to_the_host(golden, load, layout_on, tmp_path):
    _, cfg, _ = load(golden("opt"), "8x1")
    cfg = replace(cfg, width=256, embed_width=256, mlp_width=1024, num_layers=6, head_size=64)
    specs: Any = param_specs(cfg)
    params = init_params(specs, layout_on("8x1", cfg), jnp.float32, key=jax.random.key(0))
    save_hf(tmp_path / "warm", params, cfg, "float32")
    tracemalloc.start()
    save_hf(tmp_path / "out", params, cfg, "float32")
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert peak < 4 * largest < total / 3
    assert left < largest


def test_no_warning_about_casts(golden, load, tmp_path):
    params, cfg, _ = load(golden("opt"), dtype=jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_hf(tmp_path / "out", params, cfg, "float32")
