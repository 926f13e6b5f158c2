"""PEFT's adapter directories: what PEFT computed with them, round trips, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.byte_tokenizer import byte_tokenizer
from rlhf_jax.hf.config_io import load_config
from rlhf_jax.hf.export import save_hf
from rlhf_jax.hf.peft import open_adapter
from rlhf_jax.hf.peft_export import save_adapter, short_names
from rlhf_jax.hf.pieces import embedding_name
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.hf.safetensors_io import read_header, write_file
from rlhf_jax.models.adapted import merge, without_adapters
from rlhf_jax.models.decoder import forward, gather_outer
from rlhf_jax.models.layers import logits_from_hidden
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, adapters_in, split, trains
from rlhf_jax.models.params import compute_layout, param_specs, scalar_specs, store_layout
from rlhf_jax.models.scoring import scalar_scores
from tests.models.cases import put_params, random_values
from tests.reference import lora as truth

KEY = jax.random.key(0)


@pytest.fixture
def placed(golden, tmp_path):
    """`placed("opt_adapter", "opt")`: a golden adapter beside its base, which it names."""

    def run(name: str, base: str, **changes: Any) -> Path:
        directory = tmp_path / name
        shutil.copytree(golden(name), directory)
        if not (tmp_path / base).exists():
            shutil.copytree(golden(base), tmp_path / base)
        settings = json.loads((directory / "adapter_config.json").read_text())
        settings |= {"base_model_name_or_path": str(tmp_path / base)} | changes
        (directory / "adapter_config.json").write_text(json.dumps(settings))
        return directory

    return run


@pytest.fixture(autouse=True)
def _any_tokenizer(monkeypatch):
    """The golden models have none: their vocabulary is smaller than that of any tokenizer."""
    monkeypatch.setattr(
        "rlhf_jax.hf.pretrained.load_tokenizer", lambda directory, cfg: byte_tokenizer()
    )


def mesh_of(name: str) -> jax.sharding.Mesh:
    return make_mesh(parse_mesh(name), parse_mesh(name).tensor)


def outputs(params: Any, cfg: Any, tokens: np.ndarray, mesh: Any, *, scalar: bool) -> np.ndarray:
    """Logits, or scores, at every position of rows of the production path."""
    layout = compute_layout(cfg, mesh)
    rows = -(-len(tokens) // layout.batch_size_divisor) * layout.batch_size_divisor
    padded = np.zeros((rows, tokens.shape[1]), np.int32)
    padded[: len(tokens)] = tokens

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        if scalar:
            return scalar_scores(params, forward(params.body, tokens, cfg, layout))
        hidden = forward(params, tokens, cfg, layout)
        return logits_from_hidden(gather_outer(params, cfg, layout), hidden, cfg)

    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(run)(params, put_batch(padded, layout)))[: len(tokens)]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("name", "mesh_name"), [("opt", "1x1"), ("llama", "4x2")])
def test_adapters_compute_what_peft_computes(name, mesh_name, merged, placed, golden, tolerance):
    """Ranks and alphas that differ by module, and rank-stabilised scaling, are in the llama one."""
    model, mesh = find_pretrained(str(placed(f"{name}_adapter", name))), mesh_of(mesh_name)
    store = store_layout(model.cfg, mesh)
    params = model.params(store, jnp.dtype(np.float32), merged=merged, key=KEY)
    assert any(adapters_in(params)) != merged
    numbers = np.load(golden(f"{name}_adapter") / "golden.npz")
    found = outputs(params, model.cfg, numbers["right_tokens"], mesh, scalar=False)
    bare = np.load(golden(name) / "golden.npz")["right_logits"]
    for row, n in enumerate(numbers["lengths"]):
        expected = numbers["right_logits"][row, :n]
        assert np.abs(expected - bare[row, :n]).max() > 0.3
        ours = found[row, :n, : model.cfg.vocab_size]
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_classifier_brings_its_head_norms_and_biases(placed, golden):
    directory = placed("opt_scorer_adapter", "opt")
    model, mesh = find_pretrained(str(directory), scalar=True), mesh_of("1x1")
    assert model.is_scalar
    assert model.home == directory
    params = model.scalar_model(store_layout(model.cfg, mesh), jnp.dtype(np.float32), key=KEY)
    numbers = np.load(golden("opt_scorer_adapter") / "golden.npz")
    scores = outputs(params, model.cfg, numbers["right_tokens"], mesh, scalar=True)
    last = scores[np.arange(len(scores)), numbers["lengths"] - 1]
    np.testing.assert_allclose(last, numbers["scores"], rtol=1e-4, atol=1e-4)


QUERY_AND_VALUE = LoRAConfig(dim=4, alpha=8.0, modules=("q_proj", "v_proj"))


def trained_model(cfg: Any, lora: LoRAConfig, *, scalar: bool = False) -> tuple[Any, Any, Any]:
    """NumPy values of a model with adapters as training leaves them, its declarations and mask:
    `side` is zero where a row has no part in a column.
    """
    plain = scalar_specs(cfg) if scalar else param_specs(cfg)
    specs = adapted_specs(plain, cfg, lora)
    values = random_values(specs, seed=3)

    def clean(leaf: Any) -> Any:
        if not hasattr(leaf, "side_FA") or not leaf.rows:
            return leaf
        rows = np.tile(np.repeat([0, 1, 2], leaf.rows), len(leaf.side_FA) // sum(leaf.rows))
        owned = rows[:, None] == np.repeat([0, 1, 2], leaf.ranks)[None]
        return leaf.replace(side_FA=np.where(owned, leaf.side_FA, 0))

    values = jax.tree.map(clean, values, is_leaf=lambda node: hasattr(node, "side_FA"))
    return values, specs, trains(specs, lora)


CASES = [
    ("opt", QUERY_AND_VALUE, False),
    ("llama", LoRAConfig(dim=2, only=True), False),
    ("llama", LoRAConfig(dim=2, modules=("layers.1.self_attn.o_proj", "up_proj")), False),
    ("opt_scorer", LoRAConfig(dim=3, only=True, modules=("k_proj", "fc2")), True),
]


@pytest.mark.parametrize(("name", "lora", "scalar"), CASES)
def test_a_round_trip_gives_the_same_factors_and_weights(name, lora, scalar, golden, tmp_path):
    """Written on 4x2; also where embeddings, norms and biases trained."""
    cfg = load_config(golden(name), scalar=scalar)
    values, specs, mask = trained_model(cfg, lora, scalar=scalar)
    mesh = mesh_of("4x2")
    store = store_layout(cfg, mesh)
    params = put_params(values, specs, store)
    save_adapter(
        tmp_path / "adapter", split(params, mask)[0], cfg, "float32", lora, str(golden(name)),
        scalar=scalar,
    )  # fmt: skip
    model = find_pretrained(str(tmp_path / "adapter"), scalar=scalar)
    read = model.scalar_model if scalar else model.params
    found = read(store, jnp.dtype(np.float32), merged=False, key=KEY)
    base = find_pretrained(str(golden(name)), scalar=scalar)
    start = (base.scalar_model if scalar else base.params)(store, jnp.dtype(np.float32), key=KEY)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, params)

    def same(yes: bool, ours: Any, trained: Any, original: Any) -> None:
        np.testing.assert_array_equal(ours, trained if yes else original)

    jax.tree.map(same, mask, found, params, with_base(params, start))


def with_base(params: Any, base: Any) -> Any:
    """The tree of `params` with base weights, wherever there are any, from `base`."""
    return jax.tree.map(
        lambda leaf, other: leaf.replace(base_FD=other) if hasattr(leaf, "side_FA") else other,
        params,
        base,
        is_leaf=lambda node: hasattr(node, "side_FA"),
    )


def test_an_adapter_has_the_names_that_peft_gives(golden, tmp_path):
    cfg = load_config(golden("opt"))
    lora = replace(QUERY_AND_VALUE, only=True)
    values, specs, mask = trained_model(cfg, lora)
    params = put_params(values, specs, store_layout(cfg, mesh_of("1x1")))
    save_adapter(tmp_path / "out", split(params, mask)[0], cfg, "bfloat16", lora, "facebook/opt")
    ours, theirs = (
        {name: tensor.shape for name, tensor in read_header(directory).items()}
        for directory in (
            tmp_path / "out" / "adapter_model.safetensors",
            golden("opt_adapter") / "adapter_model.safetensors",
        )
    )
    assert ours == theirs
    config, golden_config = (
        json.loads((directory / "adapter_config.json").read_text())
        for directory in (tmp_path / "out", golden("opt_adapter"))
    )
    assert config.pop("base_model_name_or_path") == "facebook/opt"
    for key, value in config.items():
        if key == "target_modules":
            value, golden_config[key] = sorted(value), sorted(golden_config[key])
        assert golden_config[key] == value, key


def test_an_export_is_the_merged_model(golden, load, tmp_path, tolerance):
    cfg = load_config(golden("llama"))
    values, specs, _ = trained_model(cfg, LoRAConfig(dim=2))
    params = put_params(values, specs, store_layout(cfg, mesh_of("4x2")))
    save_hf(tmp_path / "out", params, cfg, "float32")
    found, _, _ = load(tmp_path / "out")
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, **tolerance(np.float32)),
        found,
        truth.merge(values),
    )
    with jax.set_mesh(mesh_of("4x2")):
        merged = jax.jit(merge)(params)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, **tolerance(np.float32)),
        merged,
        found,
    )
    changed = np.asarray(found.layers[0].down_FD) - values.layers[0].down_FD.base_FD
    assert np.abs(changed).max() > 0.1
    assert without_adapters(params).layers[0].down_FD is params.layers[0].down_FD.base_FD


def test_short_names_stand_for_chosen_modules_alone():
    everything = [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("q_proj", "fc1")]
    assert short_names(everything, everything) == ["q_proj", "fc1"]
    assert short_names(["layers.1.fc1"], everything) == ["layers.1.fc1"]


def test_an_adapter_for_another_base_is_refused_with_both_names(placed, tmp_path):
    directory = placed("opt_adapter", "llama")
    with pytest.raises(ValueError, match=r"opt_adapter does not fit its base model .*llama") as e:
        find_pretrained(str(directory))
    assert "no such module: model.decoder.layers.0.self_attn.q_proj.lora_A.weight" in str(e.value)


def test_an_adapter_of_another_size_is_refused(placed, golden):
    directory = placed("opt_adapter", "opt")
    rewrite(directory, lambda name, a: a[:, :16] if name.endswith("q_proj.lora_A.weight") else a)
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \[4, 16\], .* needs \[4, 32\]"):
        find_pretrained(str(directory))


def test_half_an_adapter_is_refused(placed):
    directory = placed("opt_adapter", "opt")
    file, gone = directory / "adapter_model.safetensors", "layers.0.self_attn.q_proj.lora_B.weight"
    arrays = {n: np.array(t.view()) for n, t in read_header(file).items() if not n.endswith(gone)}
    write_file(file, {n: (a.dtype, a.shape) for n, a in arrays.items()}, arrays.items())
    with pytest.raises(ValueError, match=f"missing: model.decoder.{gone}"):
        find_pretrained(str(directory))


def test_an_adapter_for_a_base_with_fewer_layers_is_refused(placed):
    """All that it has fits; what the other layers of this base should have is not there."""
    directory = placed("opt_adapter", "opt")
    file = directory / "adapter_model.safetensors"
    kept = {
        name: np.array(tensor.view())
        for name, tensor in read_header(file).items()
        if ".layers.1." not in name
    }
    write_file(file, {name: (a.dtype, a.shape) for name, a in kept.items()}, kept.items())
    with pytest.raises(ValueError, match=r"missing: model.decoder.layers.1.\S*lora_A.weight"):
        find_pretrained(str(directory))


def test_an_embedding_that_peft_untied_is_refused(placed):
    """Its copy was trained, and the head is still the base's, unless the config says otherwise."""
    directory = placed("opt_adapter", "opt")
    base = Path(open_adapter(directory).base)
    name = embedding_name(load_config(base))
    table = np.array(read_header(base / "model.safetensors")[name].view())
    rewrite(directory, lambda _, array: array, {f"base_model.model.{name}": table + 1})
    with pytest.raises(ValueError, match=r"trained embedding and no lm_head\.weight"):
        find_pretrained(str(directory))
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ensure_weight_tying": True}))
    found = find_pretrained(str(directory))
    assert found.adapter is not None
    save_adapter(
        directory.parent / "again", {}, found.cfg, "float32", QUERY_AND_VALUE, str(base),
        carried=found.adapter.whole,
    )  # fmt: skip
    again = open_adapter(directory.parent / "again")
    for tied in (name, "lm_head.weight"):
        np.testing.assert_array_equal(again.whole[tied].view(), table + 1)


def rewrite(directory: Path, change: Any, extra: dict[str, np.ndarray] | None = None) -> None:
    """The weights of an adapter with other values."""
    file = directory / "adapter_model.safetensors"
    arrays = {name: np.array(change(name, t.view())) for name, t in read_header(file).items()}
    arrays |= extra or {}
    write_file(file, {n: (a.dtype, a.shape) for n, a in arrays.items()}, arrays.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported, only False"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' is not supported"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path: write there"),
        ({"base_model_name_or_path": "/nowhere"}, "is an adapter, its base model /nowhere cannot"),
        ({"base_model_name_or_path": "quickstart"}, "for quickstart, which is not a checkpoint"),
    ],
)
def test_adapters_that_cannot_be_read_are_refused(changes, message, placed):
    with pytest.raises(ValueError, match=message):
        find_pretrained(str(placed("opt_adapter", "opt", **changes)))


def test_a_directory_without_weights_is_refused(placed):
    directory = placed("opt_adapter", "opt")
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model.safetensors"):
        find_pretrained(str(directory))


def test_a_head_that_was_untied_is_refused(placed):
    directory = placed("opt_adapter", "opt")
    rows = load_config(Path(open_adapter(directory).base)).vocab_size
    head = {"base_model.model.lm_head.weight": np.ones((rows, 32), np.float32)}
    rewrite(directory, lambda name, array: array, head)
    with pytest.raises(ValueError, match="trained lm_head.weight, but .* ties it"):
        find_pretrained(str(directory))
