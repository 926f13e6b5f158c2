"""Checkpoints: what is saved comes back bit for bit, on any mesh, or the error says why not."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.runtime.checkpoint import Checkpoints


@flax.struct.dataclass
class State:
    """The kinds of leaves a stage's state has."""

    weights: list[dict[str, Any]]
    master: jax.Array
    step: jax.Array
    ema: Any = None


def a_state() -> State:
    w_ED = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
    return State(
        weights=[{"w_ED": w_ED.astype(jnp.bfloat16)}, {"w_ED": -w_ED.astype(jnp.bfloat16)}],
        master=w_ED / 3,
        step=jnp.int32(7),
    )


def on_mesh(state: State, shape: tuple[int, int]) -> State:
    """Arrays of two dims with their first dim over the whole mesh, scalars replicated."""
    mesh = jax.make_mesh(shape, ("data", "tp"), devices=jax.devices()[: shape[0] * shape[1]])

    def place(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(("tp", "data"), None) if x.ndim else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


def abstract(state: State) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(left: State, right: State) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_state_comes_back_on_any_mesh(tmp_path: Path) -> None:
    state = a_state()
    meta = {"loader_step": 12, "kl_coef": 0.125, "notes": ["a", None]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, on_mesh(state, (8, 1)), meta)
        checkpoints.wait()
        for shape in ((8, 1), (4, 2), (1, 1)):
            target = on_mesh(jax.tree.map(jnp.zeros_like, state), shape)
            restored = checkpoints.restore(7, abstract(target))
            assert_same(restored, state)
            assert checkpoints.meta(7) == meta
            assert restored.master.sharding == target.master.sharding
    assert json.loads((tmp_path / "7" / "meta" / "metadata").read_text()) == meta


def test_an_update_that_donates_does_not_change_what_is_being_saved(tmp_path: Path) -> None:
    state = on_mesh(a_state(), (8, 1))
    before = jax.tree.map(np.array, state)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        state = update(state)
        checkpoints.wait()
        restored = checkpoints.restore(1, abstract(state))
    assert_same(restored, before)


def test_what_lies_on_the_host_is_written_before_an_update_may_have_it(tmp_path: Path) -> None:
    """On a GPU orbax reads host memory in place, and what is read cannot be donated."""
    mesh = jax.make_mesh((8,), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data", None), memory_kind="pinned_host")
    there = jax.device_put(np.ones((4096, 1024), np.float32), place)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"here": jnp.ones(2), "there": there}, {})
        assert checkpoints.steps() == [1]


def test_the_newest_are_kept_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    tree = {"x": jnp.zeros(2)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (1, 2, 3, 3):
            checkpoints.save(step, {"x": tree["x"] + step}, {"step": step})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    with Checkpoints(tmp_path, keep=2) as reopened:
        assert reopened.latest_step() == 3
        restored, meta = reopened.restore(3, tree), reopened.meta(3)
        again = reopened.restore(3, tree, free=True)
    assert restored["x"].tolist() == again["x"].tolist() == [3, 3]
    assert tree["x"].is_deleted(), "it would lie in memory beside what is read"
    assert meta == {"step": 3}


def test_what_a_killed_run_left_is_ignored(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"x": jnp.ones(2)}, {})
    (tmp_path / "6.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "8" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 5
        with pytest.raises(FileNotFoundError, match=r"step 8 .* there are \[5\]"):
            checkpoints.restore(8, {"x": jnp.ones(2)})
        checkpoints.save(7, {"x": jnp.ones(2)}, {})
        checkpoints.wait()
        assert checkpoints.latest_step() == 7


def test_a_tree_that_does_not_match_names_its_leaves(tmp_path: Path) -> None:
    saved = {"actor": {"w_ED": jnp.ones((4, 2), jnp.bfloat16), "old": jnp.int32(1)}}
    wanted = {"actor": {"w_ED": jnp.ones((4, 3), jnp.float32)}, "ema": [jnp.ones(2)]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {})
        checkpoints.wait()
        with pytest.raises(ValueError, match="3 of 3 arrays") as error:
            checkpoints.restore(1, wanted)
    message = str(error.value)
    assert "actor.w_ED: wanted float32[4,3], found bfloat16[4,2]" in message
    assert "ema.0: wanted float32[2], not saved" in message
    assert "actor.old: found int32[], not wanted" in message


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("state/_sharding", "_sharding.*Invalid JSON"),
        ("state/_METADATA", "Expecting value"),
        ("state/manifest.ocdbt", "Encoded length .0. is less"),
        ("meta/metadata", "Expecting value"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_way_around_it(
    tmp_path: Path, file: str, cause: str
) -> None:
    tree = {"x": jnp.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (20, 40):
            checkpoints.save(step, tree, {})
            checkpoints.wait()
        for step, way in ((40, "go on from step 20"), (20, "begin the stage anew")):
            newest = tmp_path / str(step)
            (newest / file).write_bytes(b"")
            advice = f"If it is damaged, move it away to {way}$"
            with pytest.raises(ValueError, match=f"{newest} cannot be read: .*{cause}") as error:
                _ = checkpoints.meta(step), checkpoints.restore(step, tree)
            assert re.search(advice, str(error.value))
            assert "\n" not in str(error.value)
            shutil.rmtree(newest)


def test_damaged_arrays_are_told_in_a_line(tmp_path: Path) -> None:
    tree = {"x": jax.random.normal(jax.random.key(0), (64, 64))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree, {})
        checkpoints.wait()
        for file in (tmp_path / "1" / "state" / "ocdbt.process_0" / "d").iterdir():
            file.write_bytes(b"")
        with pytest.raises(ValueError, match=r"cannot be read: .* not valid for value of size 0"):
            checkpoints.restore(1, tree)


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_a_save_that_failed_is_told_once_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, broken = os.rename, [True]

    def fail_once(before: object, after: object, **options: object) -> None:
        if broken and os.path.basename(str(after)) == "1":
            broken.clear()
            raise OSError("no such luck")
        rename(before, after, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(os, "rename", fail_once)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)}, {})
        with pytest.raises(OSError, match="no such luck"):
            checkpoints.wait()
        checkpoints.wait()
        checkpoints.save(2, {"x": jnp.ones(2)}, {})
    assert checkpoints.steps() == [2]
