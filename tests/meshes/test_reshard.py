"""Going from one table to another: what it costs, by the specs and by the compiled program."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.layout import Layout, make_mesh, parse_mesh
from meshes.reshard import local_shards, put_batch, put_rows, reshard_params
from meshes.spec import Normal, ParamSpec
from tests.meshes.compiled import REMATERIALIZED, collectives, fresh_compiler

UNITS = {"vocab": 128, "mlp": 256, "qkv": 16, "heads": 16}
SPEC = ParamSpec((256, 4), ("mlp", None), Normal(1.0))
LAYOUTS = [
    ("8x1", 1), ("8x1", 2), ("8x1", 4), ("8x1", 8), ("4x2", 2), ("4x2", 4), ("4x2", 8),
    ("2x4", 4), ("2x4", 8), ("1x8", 8), ("2x2x2", 2), ("2x2x2", 4),
]  # fmt: skip


def tables(mesh: str, inference_tp: int) -> tuple[Layout, Layout, Layout]:
    devices = make_mesh(parse_mesh(mesh), inference_tp)
    store, compute, generate = (
        Layout.create(devices, table, UNITS) for table in ("store", "compute", "generate")
    )
    return store, compute, generate


def moved(source: NamedSharding, target: NamedSharding) -> dict[str, int]:
    """What XLA compiles a change of layout into."""
    mesh: Any = source.mesh
    with jax.set_mesh(mesh):
        weight = jax.ShapeDtypeStruct(SPEC.shape, jnp.float32, sharding=source)
        move = jax.jit(lambda x: jax.sharding.reshard(x, target))
        return collectives(move.lower(weight).compile())


@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_store_shards_over_every_device_of_a_replica(mesh, inference_tp):
    store, _, _ = tables(mesh, inference_tp)
    shard = store.param_sharding(SPEC).shard_shape(SPEC.shape)
    shape = parse_mesh(mesh)
    assert shard == (256 // (shape.fsdp * shape.tensor), 4)


@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_a_device_keeps_its_own_rows_from_store_to_generate(mesh, inference_tp):
    """Every device's rows in STORE lie inside its rows in GENERATE and in COMPUTE.

    Only then is the way there one all-gather, and the way back a slice.
    """
    store, compute, generate = (t.param_sharding(SPEC) for t in tables(mesh, inference_tp))
    rows = store.devices_indices_map(SPEC.shape)
    for wider in (compute, generate):
        for device, (wide, _) in wider.devices_indices_map(SPEC.shape).items():
            inner = range(256)[rows[device][0]]
            assert set(inner) <= set(range(256)[wide])


@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_store_is_generate_where_decoding_uses_every_device(mesh, inference_tp):
    store, _, generate = tables(mesh, inference_tp)
    shape = parse_mesh(mesh)
    same = store.spec("mlp", None) == generate.spec("mlp", None)
    assert same == (inference_tp == shape.fsdp * shape.tensor)


@pytest.mark.parametrize(
    ("mesh", "inference_tp", "expected"),
    [("8x1", 8, {}), ("1x8", 8, {}), ("8x1", 2, {"all-gather": 1}), ("4x2", 4, {"all-gather": 1})],
)
def test_store_to_generate_is_one_all_gather_or_nothing(mesh, inference_tp, expected):
    store, _, generate = tables(mesh, inference_tp)
    source, target = store.param_sharding(SPEC), generate.param_sharding(SPEC)
    assert moved(source, target) == expected
    assert moved(target, source) == {}


def test_another_order_of_axes_would_cost_a_permute():
    """The control for the test above: STORE with the data axis major."""
    store, _, generate = tables("4x2", 2)
    other = NamedSharding(store.mesh, P(("data", "tp"), None))
    assert "collective-permute" in moved(other, generate.param_sharding(SPEC))


def test_no_change_of_layout_replicates_a_weight(capfd):
    with fresh_compiler():
        for mesh, inference_tp in (("8x1", 2), ("4x2", 2), ("4x2", 4)):
            store, compute, generate = (t.param_sharding(SPEC) for t in tables(mesh, inference_tp))
            for source, target in ((store, compute), (store, generate), (generate, store)):
                moved(source, target)
    assert REMATERIALIZED not in capfd.readouterr().err


def test_the_compiler_says_so_where_one_does(capfd):
    """The control for the test above: from rows to columns over two axes, in the wrong order."""
    store, _, _ = tables("4x2", 2)
    source = NamedSharding(store.mesh, P(("data", "tp"), None))
    with fresh_compiler():
        moved(source, NamedSharding(store.mesh, P(None, "tp")))
    assert REMATERIALIZED in capfd.readouterr().err


def test_reshard_params_keeps_every_value():
    store, compute, generate = tables("4x2", 4)
    specs = {"w": SPEC, "b": ParamSpec((256,), ("mlp",), Normal(1.0))}
    values = {"w": np.arange(1024.0).reshape(256, 4), "b": np.arange(256.0)}
    with jax.set_mesh(store.mesh):
        params = {
            name: jax.make_array_from_callback(
                spec.shape, store.param_sharding(spec), lambda index, v=values[name]: v[index]
            )
            for name, spec in specs.items()
        }
        for layout in (compute, generate):
            found = jax.jit(lambda p, to=layout: reshard_params(p, specs, to))(params)
            for name, spec in specs.items():
                assert found[name].sharding == layout.param_sharding(spec)
                np.testing.assert_array_equal(found[name], values[name])


def test_batches_are_cut_over_the_devices_that_share_them():
    store, compute, generate = tables("4x2", 4)
    batch = {"tokens": np.arange(24).reshape(8, 3), "valid": np.ones(8, np.float32)}
    for layout, rows in ((compute, 2), (generate, 4)):
        put = put_batch(batch, layout)
        assert put["tokens"].sharding.shard_shape((8, 3)) == (rows, 3)
        assert {shard.data.shape for shard in put["valid"].addressable_shards} == {(rows,)}
        np.testing.assert_array_equal(put["tokens"], batch["tokens"])
    assert put_rows(np.arange(5), store, None).is_fully_replicated
    assert put_rows(np.array(1.0), store, None).shape == ()


def test_local_shards_run_on_what_a_device_holds():
    _, compute, _ = tables("4x2", 2)
    seen = []

    def add(x, y):
        seen.append((x.shape, y.shape))
        return x + y.sum()

    run = local_shards(add, compute, in_axes=(("batch", None), ("mlp",)), out_axes=("batch", "mlp"))
    rows = put_rows(np.ones((8, 2), np.float32), compute, "batch")
    weights = put_rows(np.arange(256, dtype=np.float32), compute, "mlp")
    with jax.set_mesh(compute.mesh):
        out = np.asarray(jax.jit(run)(rows, weights))
    assert seen[0] == ((2, 2), (128,))
    halves = [1 + math.comb(128, 2), 1 + math.comb(256, 2) - math.comb(128, 2)]
    np.testing.assert_allclose(out, np.repeat([halves], 8, 0).repeat(2, 1))
