"""Meshes from flags, and the tables that place arrays on them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshes.layout import (
    Layout,
    MeshShape,
    check_device_count,
    check_inference_tp,
    default_inference_tp,
    make_mesh,
    parse_mesh,
)
from meshes.rules import TableName
from meshes.spec import Constant, Normal, ParamSpec, Sinusoids

UNITS = {"vocab": 128, "mlp": 256, "qkv": 9, "heads": 9, "width": 24}


def layout(mesh: str, inference_tp: int, table: TableName, units=UNITS) -> Layout:
    return Layout.create(make_mesh(parse_mesh(mesh), inference_tp), table, units)


def test_meshes_are_written_fsdp_x_tensor_or_with_replicas_in_front():
    assert parse_mesh("8x1") == MeshShape(1, 8, 1)
    assert parse_mesh("4X2") == MeshShape(1, 4, 2)
    assert parse_mesh("2x4x1") == MeshShape(2, 4, 1)
    assert parse_mesh("2x4x1").num_devices == 8
    assert [str(parse_mesh(text)) for text in ("4x2", "2x2x2", "1x4x2")] == ["4x2", "2x2x2", "4x2"]


@pytest.mark.parametrize("text", ["8", "", "8x", "0x1", "-1x8", "2x2x2x2", "axb", "4*2"])
def test_what_is_not_a_mesh_says_what_is(text):
    with pytest.raises(ValueError, match=f"--mesh={text}".replace("*", r"\*") + ".*FxT.*RxFxT"):
        parse_mesh(text)


def test_a_mesh_of_too_many_devices_names_meshes_that_fit():
    check_device_count(parse_mesh("8x1"), 8)
    check_device_count(parse_mesh("2x1"), 8)
    with pytest.raises(
        ValueError, match=r"asks for 8 devices, 4 are visible: .*=4x1 or --mesh=2x2"
    ):
        check_device_count(parse_mesh("8x1"), 4)
    with pytest.raises(ValueError, match=r"asks for 2 devices, 1 is visible: use --mesh=1x1$"):
        check_device_count(parse_mesh("1x2"), 1)


@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "expected"),
    [
        ("8x1", 9, 3, 1),
        ("8x1", 12, 12, 4),
        ("8x1", 8, 4, 4),
        ("8x1", 32, 32, 8),
        ("4x2", 12, 12, 4),
        ("1x8", 32, 8, 8),
        ("6x1", 9, 3, 3),
        ("2x4x1", 32, 32, 4),  # a replica decodes by itself
        ("4x2", 9, 3, 2),  # no multiple of T divides: N = T
    ],
)
def test_the_default_inference_tp_is_the_largest_that_divides(mesh, heads, kv_heads, expected):
    shape = parse_mesh(mesh)
    assert default_inference_tp(shape, heads, kv_heads) == expected
    check_inference_tp(shape, expected)


@pytest.mark.parametrize(
    ("mesh", "size", "allowed"),
    [
        ("8x1", 3, "1, 2, 4, 8"),
        ("8x1", 16, "1, 2, 4, 8"),
        ("4x2", 1, "2, 4, 8"),
        ("2x4", 6, "4, 8"),
        ("2x4x1", 8, "1, 2, 4"),
        ("6x1", 4, "1, 2, 3, 6"),
    ],
)
def test_an_inference_tp_that_does_not_fit_lists_those_that_do(mesh, size, allowed):
    with pytest.raises(
        ValueError, match=f"--inference-tp-size={size} .*{mesh}: use one of {allowed}$"
    ):
        make_mesh(parse_mesh(mesh), size)


def test_gen_is_minor_to_data_in_device_order():
    """Neighbours decode together: tensor parallelism stays within the fastest links."""
    mesh = make_mesh(parse_mesh("8x1"), 4)
    assert dict(mesh.shape) == {"replica": 1, "data": 2, "gen": 4, "tp": 1}
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids[0, :, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("mesh", "inference_tp", "store", "compute", "generate"),
    [
        ("1x1", 1, P(None, None), P(None, None), P(None, None)),
        ("8x1", 1, P("data", None), P(None, None), P(None, None)),
        ("8x1", 2, P(("gen", "data"), None), P(None, None), P("gen", None)),
        ("8x1", 8, P("gen", None), P(None, None), P("gen", None)),
        ("4x2", 2, P(("tp", "data"), None), P("tp", None), P("tp", None)),
        ("4x2", 4, P(("tp", "gen", "data"), None), P("tp", None), P(("tp", "gen"), None)),
        ("1x8", 8, P("tp", None), P("tp", None), P("tp", None)),
        ("2x2x2", 4, P(("tp", "gen"), None), P("tp", None), P(("tp", "gen"), None)),
    ],
)
def test_specs_drop_axes_of_size_1(mesh, inference_tp, store, compute, generate):
    """Explicit types of equal layouts do not mix otherwise."""
    specs = [
        layout(mesh, inference_tp, t).spec("mlp", None) for t in ("store", "compute", "generate")
    ]
    assert specs == [store, compute, generate]


@pytest.mark.parametrize(
    ("mesh", "inference_tp", "store"),
    [
        ("8x1", 1, P(None, "data")),
        ("4x2", 4, P(None, ("tp", "gen", "data"))),
        ("1x8", 8, P(None, "tp")),
        ("2x2x2", 2, P(None, ("tp", "data"))),
        ("5x1", 1, P(None, None)),  # 24 columns do not divide
    ],
)
def test_a_width_is_sharded_where_it_is_stored_and_nowhere_else(mesh, inference_tp, store):
    specs = [
        layout(mesh, inference_tp, t).spec(None, "width") for t in ("store", "compute", "generate")
    ]
    assert specs == [store, P(None, None), P(None, None)]


@pytest.mark.parametrize(
    ("mesh", "inference_tp", "train", "generate"),
    [
        ("8x1", 1, 8, 8),
        ("8x1", 4, 8, 2),
        ("4x2", 4, 4, 2),
        ("1x8", 8, 1, 1),
        ("2x2x2", 4, 4, 2),
        ("2x4x1", 1, 8, 8),
    ],
)
def test_devices_that_share_a_batch(mesh, inference_tp, train, generate):
    assert layout(mesh, inference_tp, "compute").batch_size_divisor == train
    assert layout(mesh, inference_tp, "generate").batch_size_divisor == generate


def test_what_does_not_divide_is_replicated_and_logged(caplog):
    with caplog.at_level(logging.INFO, logger="meshes.layout"):
        place = layout("4x2", 2, "generate", {"vocab": 128, "mlp": 256, "qkv": 9})
    assert place.spec("qkv", None) == P(None, None)
    assert place.spec("mlp", None) == P("tp", None)
    assert caplog.messages == [
        "generate: qkv has 9 pieces, not a multiple of 2 devices: replicated"
    ]


def test_unknown_logical_axes_are_errors():
    with pytest.raises(KeyError):
        layout("4x2", 2, "store").spec("mpl", None)


@pytest.mark.parametrize("table", ["store", "compute", "generate"])
def test_a_mesh_axis_used_twice_names_both_sides(table: TableName):
    with pytest.raises(
        ValueError, match=rf"{table}: \('mlp', 'vocab'\) use a mesh axis twice: .*tp.*tp"
    ):
        layout("4x2", 2, table).spec("mlp", "vocab")


def test_a_parameter_has_one_logical_axis_per_dimension():
    with pytest.raises(ValueError, match="differ in length"):
        ParamSpec((4, 4), (None,), Normal(1.0))


def test_initial_values_leave_padded_rows_zero():
    spec = ParamSpec((128, 3), ("mlp", None), Constant(2.0), rows=100)
    value = np.asarray(spec.initialize(jax.random.key(0), jnp.dtype("bfloat16")))
    assert value.dtype == jnp.bfloat16
    assert (value[:100] == 2).all()
    assert (value[100:] == 0).all()
    vector = ParamSpec((128,), ("mlp",), Constant(2.0), rows=100)
    assert vector.initialize(jax.random.key(0), jnp.dtype("float32")).sum() == 200


def test_sinusoids_have_the_deviation_asked_for_and_position_0_at_the_offset():
    table = np.asarray(Sinusoids(0.5, 2)(jax.random.key(0), (66, 32), jnp.dtype("float32")))
    assert np.sqrt(np.mean(table**2)) == pytest.approx(0.5, rel=1e-5)
    np.testing.assert_allclose(table[2, :16], 0, atol=1e-6)  # sin 0
    np.testing.assert_allclose(table[2 + 5, 0], 0.5 * 2**0.5 * np.sin(5.0), rtol=1e-5)
