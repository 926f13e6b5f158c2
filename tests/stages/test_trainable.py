"""Models about to train with adapters: what is shared, copied, continued and left behind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.data.byte_tokenizer import byte_tokenizer
from rlhf_jax.engine.optimizer import OptimizerConfig
from rlhf_jax.engine.state import create_state
from rlhf_jax.hf.config_io import load_config
from rlhf_jax.hf.peft import open_adapter
from rlhf_jax.hf.pretrained import Pretrained, find_adapted, find_pretrained
from rlhf_jax.hf.tokenizer import load_tokenizer, turn_format_of, with_turn_format
from rlhf_jax.models.adapted import is_adapted, without_adapters
from rlhf_jax.models.lora import LoRAConfig, adapters_in, trains
from rlhf_jax.models.params import is_spec, store_layout
from rlhf_jax.models.quantized import quantize
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.stages.checks import check_models
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.supervised_config import SFTConfig
from rlhf_jax.stages.trainable import Trainable, export_adapter, load_trainable
from tests.models.cases import random_values

GOLDENS = Path(__file__).parents[1] / "goldens"
ONLY = LoRAConfig(dim=2, alpha=4.0, only=True, modules=("q_proj", "v_proj", "fc2"))
MIXED = replace(ONLY, only=False)
SHAPE = parse_mesh("4x2")
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _any_tokenizer(monkeypatch):
    """The golden models have none: their vocabulary is smaller than that of any tokenizer."""
    monkeypatch.setattr(
        "rlhf_jax.hf.pretrained.load_tokenizer", lambda directory, cfg: byte_tokenizer()
    )


def opt(name: str = "opt", *, scalar: bool = False) -> Pretrained:
    cfg = load_config(GOLDENS / name, scalar=scalar)
    return Pretrained(str(GOLDENS / name), cfg, byte_tokenizer(), GOLDENS / name, None)


def load(base: Pretrained, lora: LoRAConfig, *, scalar: bool = False) -> Trainable:
    mesh = make_mesh(SHAPE, 2)
    store = store_layout(base.cfg, mesh)
    with jax.set_mesh(mesh):
        return load_trainable(
            base, lora, store, jnp.dtype(np.float32), scalar=scalar, key=jax.random.key(1)
        )


def shared(one: Any, other: Any) -> dict[str, bool]:
    """Whether the leaves of two models are the same buffers, by path."""
    pairs = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): a is b for (path, a), b in pairs
    }


def test_with_only_lora_the_reference_is_the_base_itself():
    model = load(opt(), ONLY)
    reference = model.reference()
    assert not any(adapters_in(reference))
    assert all(shared(reference, without_adapters(model.params)).values())


@pytest.mark.parametrize("lora", [MIXED, LoRAConfig()], ids=["mixed", "none"])
def test_where_more_trains_the_reference_has_copies_of_that_alone(lora):
    """An update donates what trains: the reference must not stand on those buffers."""
    model = load(opt(), lora)
    reference = model.reference()
    same = shared(reference, without_adapters(model.params))
    adapted = {path for path, _ in adapters_in(model.params)}
    assert {path for path, yes in same.items() if yes} == adapted
    jax.tree.map(lambda leaf: leaf.delete(), model.trained)
    expected = load(opt(), LoRAConfig()).params
    jax.tree.map(np.testing.assert_array_equal, reference, expected)


def test_a_reward_models_head_is_a_copy_for_its_frozen_twin():
    model = load(opt("opt_scorer", scalar=True), ONLY, scalar=True)
    same = shared(model.reference(), without_adapters(model.params))
    assert [path for path, yes in same.items() if not yes] == ["head_W"]


def run_in(directory: Path, **settings: Any) -> Run:
    directory.mkdir(exist_ok=True)
    cfg = TrainConfig(output_dir=str(directory), dtype="float32", **settings)
    return Run(cfg, SHAPE, 2)


def moved(model: Trainable) -> Any:
    """The parameters after some training: other values of whatever trains, but for padding and the
    structural zeros of fused adapters.
    """
    values = random_values(model.specs, seed=3)

    def one(spec: Any, leaf: Any, value: Any, yes: Any) -> Any:
        if is_adapted(leaf):
            side = value.side_FA * owned(leaf)
            side = jax.device_put(side, leaf.side_FA.sharding)
            core = jax.device_put(value.core_AD, leaf.core_AD.sharding)
            return leaf.replace(side_FA=side, core_AD=core)
        del spec
        return jax.device_put(value, leaf.sharding) if yes else leaf

    mask = trains(model.specs, model.lora)
    return jax.tree.map(
        one, model.specs, model.params, values, mask,
        is_leaf=lambda node: is_spec(node) or is_adapted(node),
    )  # fmt: skip


def owned(weight: Any) -> Any:
    """1 where a row of the fused projection and a column of `side` are of the same part."""
    if not weight.rows:
        return 1
    rows = np.tile(np.repeat([0, 1, 2], weight.rows), len(weight.side_FA) // sum(weight.rows))
    return (rows[:, None] == np.repeat([0, 1, 2], weight.ranks)[None]).astype(np.float32)


def test_an_adapter_trains_on_where_it_is_the_one_asked_for(tmp_path):
    """Its export then has the values it had and names its own base; the reference is the policy
    that training started from, not the base.
    """
    run, base = run_in(tmp_path / "run"), opt()
    first = load(base, MIXED)
    params = moved(first)
    with jax.set_mesh(run.mesh):
        export_adapter(run, "sft", base, MIXED, first.pick(params), fresh=first.fresh)
    directory = tmp_path / "run" / "sft_adapter"
    assert open_adapter(directory).base == str(GOLDENS / "opt")

    again = find_pretrained(str(directory))
    second = load(again, replace(ONLY, dropout=0.25))
    assert not second.fresh
    jax.tree.map(np.testing.assert_array_equal, arrays(second.params), arrays(params))
    assert {weight.rate for _, weight in adapters_in(second.params)} == {0.25}
    reference = second.reference()
    jax.tree.map(np.testing.assert_array_equal, arrays(reference), arrays(params))
    assert not any(yes for path, yes in shared(reference, second.params).items() if "side" in path)

    # What trained beside the adapter before is carried over, though it is frozen now.
    with jax.set_mesh(run.mesh):
        export_adapter(run, "dpo", again, ONLY, second.trained, fresh=second.fresh)
    third = find_pretrained(str(tmp_path / "run" / "dpo_adapter"))
    assert third.adapter is not None
    assert third.adapter.base == str(GOLDENS / "opt")
    jax.tree.map(np.testing.assert_array_equal, arrays(load(third, ONLY).params), arrays(params))


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_checkpoint_holds_what_trains_and_is_read_back(tmp_path):
    model = load(opt(), ONLY)
    optimizer = model.optimizer(OptimizerConfig(1e-3), 10)
    with jax.set_mesh(make_mesh(SHAPE, 2)):
        state = create_state(model.pick(moved(model)), optimizer)
        fresh = create_state(load(opt(), ONLY).trained, optimizer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        found = checkpoints.restore(1, fresh)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    # fc2, and the fused projection; two layers, two factors; moments have as many.
    assert len(jax.tree.leaves(found.params)) == 8


def test_an_adapter_has_a_tokenizer_that_says_how_it_was_asked(tmp_path, monkeypatch):
    """The base was asked otherwise, or not at all."""
    monkeypatch.setattr(
        "rlhf_jax.hf.pretrained.load_tokenizer",
        lambda directory, cfg: load_tokenizer(directory),
    )
    monkeypatch.setattr("rlhf_jax.hf.pretrained.find_pretrained", lambda name, **_: opt())
    run, asked = run_in(tmp_path / "run"), with_turn_format(byte_tokenizer(), "Q: {}\nA:")
    base = replace(opt(), tokenizer=asked)
    first = load(base, ONLY)
    with jax.set_mesh(run.mesh):
        export_adapter(run, "sft", base, ONLY, first.trained, fresh=True)
    directory = tmp_path / "run" / "sft_adapter"
    again = find_adapted("mine", open_adapter(directory), scalar=False)
    assert turn_format_of(again.tokenizer) == "Q: {}\nA:"
    assert again.directory == GOLDENS / "opt"
    (directory / "tokenizer.json").unlink()
    again = find_adapted("mine", open_adapter(directory), scalar=False)
    assert turn_format_of(again.tokenizer) is None


def test_an_adapter_s_tokenizer_that_does_not_fit_its_base_is_told(tmp_path, monkeypatch, caplog):
    """It has more tokens than the base has rows, as where a pad token was added to it."""
    monkeypatch.setattr("rlhf_jax.hf.pretrained.load_tokenizer", load_tokenizer)
    monkeypatch.setattr("rlhf_jax.hf.pretrained.find_pretrained", lambda name, **_: opt())
    run, base = run_in(tmp_path / "run"), opt()
    with jax.set_mesh(run.mesh):
        export_adapter(run, "sft", base, ONLY, load(base, ONLY).trained, fresh=True)
    adapter = open_adapter(tmp_path / "run" / "sft_adapter")
    assert len(base.tokenizer) > base.cfg.vocab_size
    found = find_adapted("mine", adapter, scalar=False)
    assert found.adapter == adapter
    assert found.cfg == opt().cfg
    assert "mine: the tokenizer of" in caplog.text
    assert "embedding rows" in caplog.text


def test_another_adapter_than_asked_for_is_merged_and_said(tmp_path, capsys):
    run, base = run_in(tmp_path / "run"), opt()
    first = load(base, ONLY)
    with jax.set_mesh(run.mesh):
        params = moved(first)
        export_adapter(run, "sft", base, ONLY, first.pick(params), fresh=True)
    again = find_pretrained(str(tmp_path / "run" / "sft_adapter"))
    second = load(again, replace(ONLY, dim=3))
    assert second.fresh
    assert "other modules, ranks or another alpha" in capsys.readouterr().out
    whole = again.params(store_layout(again.cfg, run.mesh), jnp.dtype(np.float32), key=KEY)
    jax.tree.map(np.testing.assert_array_equal, without_adapters(second.params), whole)
    with jax.set_mesh(run.mesh):
        export_adapter(run, "dpo", again, ONLY, second.trained, fresh=True)
    assert not (tmp_path / "run" / "dpo_adapter").exists()
    assert "no adapter directory, since a merged adapter is no base" in capsys.readouterr().out


@pytest.mark.parametrize("continued", [True, False], ids=["continued", "merged"])
def test_an_earlier_adapter_stands_beside_int8_or_is_merged_before_rounding(tmp_path, continued):
    """int8 is of the base, or of base and adapter together where the adapter is not trained on."""
    run, base = run_in(tmp_path / "run"), opt()
    first = load(base, ONLY)
    params = moved(first)
    with jax.set_mesh(run.mesh):
        export_adapter(run, "sft", base, ONLY, first.pick(params), fresh=True)
    again = find_pretrained(str(tmp_path / "run" / "sft_adapter"))
    second = load(again, replace(ONLY, load_in_8bit=True, dim=ONLY.dim if continued else 3))
    assert second.fresh is not continued
    store, dtype = store_layout(again.cfg, run.mesh), jnp.dtype(np.float32)
    whole = (base if continued else again).params(store, dtype, key=KEY)
    found = without_adapters(second.params)
    for mine, layer in zip(found.layers, whole.layers, strict=True):
        # k_proj has no adapter, and is frozen with the others; out_ED too, since adapters alone do.
        for name in ("qkv_ED", "out_ED", "up_FD", "down_FD"):
            expected = jax.jit(quantize)(getattr(layer, name))
            jax.tree.map(np.testing.assert_array_equal, getattr(mine, name), expected)
        np.testing.assert_array_equal(mine.up_bias_F, layer.up_bias_F)
    if continued:
        factors = zip(adapters_in(second.params), adapters_in(params), strict=True)
        for (_, one), (_, other) in factors:
            np.testing.assert_array_equal(one.side_FA, other.side_FA)


def test_the_built_in_model_leaves_no_adapter_that_nothing_could_load(tmp_path, capsys):
    run, base = run_in(tmp_path / "run"), find_pretrained("quickstart")
    export_adapter(run, "sft", base, ONLY, None, fresh=True)
    assert not (tmp_path / "run" / "sft_adapter").exists()
    assert "the built-in model is no base model" in capsys.readouterr().out


def test_without_lora_there_is_no_adapter_directory(tmp_path):
    run, base = run_in(tmp_path / "run"), opt()
    export_adapter(run, "sft", base, LoRAConfig(), None, fresh=True)
    assert not (tmp_path / "run" / "sft_adapter").exists()


def test_patterns_are_checked_before_anything_runs():
    lora = LoRAConfig(dim=2, modules=("c_attn",))
    cfg = TrainConfig(step=(1,), sft=SFTConfig(lora=lora, max_seq_len=16))
    with pytest.raises(ValueError, match=r"'c_attn' is part of no linear layer's name: .*q_proj"):
        check_models(cfg, opt())


def test_the_adapters_config_is_what_was_trained(tmp_path):
    run, base = run_in(tmp_path / "run"), opt()
    first = load(base, ONLY)
    with jax.set_mesh(run.mesh):
        export_adapter(run, "sft", base, ONLY, first.trained, fresh=True)
    config = json.loads((tmp_path / "run" / "sft_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 4.0, None)
    assert sorted(config["target_modules"]) == ["fc2", "q_proj", "v_proj"]
