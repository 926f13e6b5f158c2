"""Loading: equal on every mesh, small on the host, and errors that name file and tensor."""

import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.hf.checkpoint import open_checkpoint
from rlhf_jax.hf.config_io import load_config
from rlhf_jax.hf.convert import has_scalar_head, load_with_report
from rlhf_jax.hf.export import save_hf
from rlhf_jax.hf.pieces import embedding_name
from rlhf_jax.hf.safetensors_io import read_header, write_file
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import size
from rlhf_jax.models.params import init_params, param_specs


def rewrite(directory, change):
    """The checkpoint's tensors as `change` leaves them (a function on a dict of arrays)."""
    file = directory / "model.safetensors"
    tensors = {name: np.array(tensor.view()) for name, tensor in read_header(file).items()}
    change(tensors)
    entries = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_file(file, entries, tensors.items())


@pytest.fixture
def copy_of(golden, tmp_path):
    def run(name, change=lambda tensors: None):
        shutil.copytree(golden(name), tmp_path / name)
        rewrite(tmp_path / name, change)
        return tmp_path / name

    return run


@pytest.mark.parametrize("mesh", ["8x1", "4x2", "1x8", "2x2x2"])
@pytest.mark.parametrize("name", ["opt_post_norm", "llama"])
def test_parameters_do_not_depend_on_the_mesh(name, mesh, golden, load, same_trees):
    params, _, _ = load(golden(name), mesh)
    same_trees(params, load(golden(name))[0])


def test_rows_are_per_kv_group_its_queries_its_key_its_value(golden, load):
    params, cfg, _ = load(golden("llama"))
    stored = open_checkpoint(golden("llama")).tensors
    q, k, v = (stored[f"model.layers.1.self_attn.{x}_proj.weight"].view() for x in "qkv")
    K = cfg.head_size
    for group in range(cfg.num_kv_heads):
        rows = np.asarray(params.layers[1].qkv_ED).reshape(cfg.num_kv_heads, -1, cfg.width)[group]
        want = [q[2 * group * K : 2 * (group + 1) * K], k[group * K :][:K], v[group * K :][:K]]
        np.testing.assert_array_equal(rows, np.concatenate(want))


def test_padding_is_zero(golden, load):
    params, cfg, _ = load(golden("llama"), "8x1")
    assert np.all(np.asarray(params.embed_VW)[cfg.vocab_size :] == 0)
    for leaf in (params.layers[0].up_FD, params.layers[0].gate_FD, params.layers[0].down_FD):
        assert np.all(np.asarray(leaf)[cfg.mlp_width :] == 0)
        assert np.any(np.asarray(leaf)[cfg.mlp_width - 1] != 0)


def test_the_pickle_holds_the_same_model_in_float16(golden, load):
    ours, _, _ = load(golden("opt_bin"), "8x1")
    whole, _, _ = load(golden("opt"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(np.float16))


@pytest.mark.parametrize("prefix", ["decoder.", "rwtransformer.decoder."])
def test_bodies_without_a_language_model_load(prefix, copy_of, golden, load, same_trees):
    def change(tensors):
        for name in list(tensors):
            tensors[name.replace("model.decoder.", prefix)] = tensors.pop(name)

    same_trees(load(copy_of("opt", change))[0], load(golden("opt"))[0])


def test_the_host_holds_no_more_than_two_shards(tmp_path, layout_on):
    """By the report's own count: what JAX holds while it copies to a device is not in it."""
    cfg = size(256, 2, 4, vocab_size=4000)
    layout = layout_on("8x1", cfg)
    specs: Any = param_specs(cfg)
    params = init_params(specs, layout, jnp.float32, key=jax.random.key(0))
    save_hf(tmp_path / "out", params, cfg, "float32")
    _, report = load_with_report(tmp_path / "out", cfg, specs, layout, jnp.bfloat16)
    # Largest: the position table, which every device holds whole.
    assert report.largest_shard_bytes == 2050 * 256 * 2
    assert 0 < report.peak_host_bytes <= 2 * report.largest_shard_bytes
    assert report.live_bytes == 0


def test_loaded_parameters_can_be_donated(golden, load):
    params, _, _ = load(golden("opt"), "8x1")
    before = np.asarray(load(golden("opt"))[0].embed_VW)
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(params.embed_VW)
    assert params.embed_VW.is_deleted()
    np.testing.assert_array_equal(np.asarray(doubled), 2 * before)


def test_a_reward_model_starts_from_a_language_model_with_a_zero_head(golden, load, same_trees):
    for name in ("opt", "llama"):
        model, _, _ = load(golden(name), "8x1", scalar=True, head="new")
        assert np.all(np.asarray(model.head_W) == 0)
        whole, _, _ = load(golden(name))
        np.testing.assert_array_equal(np.asarray(model.body.embed_VW), np.asarray(whole.embed_VW))
    assert has_scalar_head(golden("opt_scorer"))
    assert not has_scalar_head(golden("opt"))


def test_heads_that_were_not_asked_for_are_errors(golden, load):
    with pytest.raises(ValueError, match=r"(?s)not expected: score\.weight.*a reward model"):
        load(golden("opt_scorer"))
    with pytest.raises(ValueError, match=r"(?s)not expected: score\.weight.*a new head"):
        load(golden("opt_scorer"), scalar=True, head="new")
    with pytest.raises(ValueError, match=r"(?s)missing: score\.weight.*a language model"):
        load(golden("opt"), scalar=True)


def test_missing_extra_and_misshapen_tensors_are_one_error_that_names_all(copy_of, load):
    def change(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        tensors["model.norm.weight"] = np.ones(33, np.float32)
        tensors["model.embed_tokens.weight"] = np.ones((90, 32), np.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    directory = copy_of("llama", change)
    with pytest.raises(ValueError, match="does not fit its config.json") as error:
        load(directory)
    message = str(error.value)
    assert str(directory / "model.safetensors") in message
    assert "missing: model.layers.1.self_attn.k_proj.weight\n" in message
    assert "not expected: model.layers.0.self_attn.q_norm.weight\n" in message
    assert "model.norm.weight has shape [33], the config says [32]" in message
    assert "no floats: model.embed_tokens.weight (int8)" in message
    assert "inv_freq" not in message


def test_a_truncated_file_names_file_and_tensor(copy_of, load):
    directory = copy_of("llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated: model\.norm\.weight"):
        load(directory)


def test_an_untied_model_without_unembedding_is_an_error(copy_of, load):
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load(copy_of("llama", lambda tensors: tensors.pop("lm_head.weight")))


def test_no_weights_says_what_was_expected_and_found(golden, tmp_path, load):
    shutil.copy(golden("opt") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors.*found config\.json"):
        load(tmp_path)


def test_a_missing_shard_and_a_lying_index_are_errors(golden, load, tmp_path):
    params, cfg, _ = load(golden("llama"))
    out = tmp_path / "out"
    save_hf(out, params, cfg, "float32", max_shard_bytes=50_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00005.safetensors"
    first = sorted(out.glob("model-*"))[0]
    index["weight_map"]["model.ghost"] = first.name
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names model\.ghost"):
        load(out)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"{first.name}, which is missing; it holds model"):
        load(out)


def test_config_sizes_are_those_of_the_file(golden):
    cfg = load_config(golden("llama"))
    assert isinstance(cfg, ModelConfig)
    assert (cfg.mlp_width, cfg.padded_mlp, cfg.num_kv_heads) == (172, 256, 2)


def test_a_head_beside_the_embedding_that_it_is_tied_to_must_equal_it(copy_of, load) -> None:
    directory = copy_of("opt")
    name = embedding_name(load_config(directory))
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[name]}))
    load(directory)
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": -tensors[name]}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load(directory)
    load(directory, scalar=True, head="new")  # which needs no unembedding
