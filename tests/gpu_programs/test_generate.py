"""Generate as an H200 would run it: what a token costs beside its arithmetic."""

import re
from math import prod

import jax
import pytest

from rlhf_jax.engine.graphs import WITH_SUMS, graph_options
from rlhf_jax.models.cache import CACHE_AXES
from rlhf_jax.models.params import generate_layout, is_spec, param_specs
from tests.gpu_programs import checks
from tests.gpu_programs.conftest import Compile
from tests.gpu_programs.programs import GQA, OPT, Iteration, Rows
from tests.gpu_programs.target import mesh_of_h200s
from tests.gpu_programs.thunks import GRAPH

pytestmark = pytest.mark.gpu_programs

ONE = {"rows": Rows(8)}
INT8 = {"weights": "int8", "kv_cache": "int8"}
FP8 = {"weights": "fp8", "kv_cache": "fp8"}
PROGRAMS = [
    pytest.param("1x1", 1, ONE, id="opt"),
    pytest.param("1x1", 1, ONE | {"actor": GQA}, id="gqa"),
    pytest.param("1x1", 1, {"slots": 8}, id="opt in slots"),
    pytest.param("1x1", 1, ONE | INT8, id="opt int8"),
    pytest.param("1x1", 1, ONE | FP8 | {"actor": GQA}, id="gqa fp8"),
    pytest.param("1x1", 1, {"rows": Rows(256)}, id="opt of many rows"),
    pytest.param("8x1", 1, {}, id="opt 8x1, each device alone"),
    pytest.param("8x1", 2, {}, id="opt 8x1, tensor parallel 2"),
    pytest.param("8x1", 8, {}, id="opt 8x1, tensor parallel 8"),
    pytest.param("8x1", 2, {"slots": 8}, id="opt in slots 8x1, tensor parallel 2"),
    pytest.param("8x1", 8, {"actor": GQA}, id="gqa 8x1, tensor parallel 8"),
]
ALONE, SPREAD = PROGRAMS[:7], PROGRAMS[7:]


def weight_shapes(iteration: Iteration) -> list[tuple[int, ...]]:
    """Of the matrices, on one device."""
    return [
        iteration.engine.rollout.param_sharding(spec).shard_shape(spec.shape)
        for spec in jax.tree.leaves(param_specs(iteration.actor), is_leaf=is_spec)
        if len(spec.shape) == 2
    ]


def cache_shape(iteration: Iteration) -> tuple[int, ...]:
    """Of the keys of one layer, on one device."""
    cfg, rows = iteration.actor, iteration.rows
    shape = (iteration.slots or rows.batch, cfg.num_kv_heads, rows.length, cfg.head_size)
    return iteration.engine.rollout.sharding(*CACHE_AXES).shard_shape(shape)


def local_rows(iteration: Iteration) -> int:
    """Rows that one device decodes."""
    return cache_shape(iteration)[0]


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), PROGRAMS)
def test_no_weight_and_no_cache_is_copied_for_a_token(
    compiled: Compile, mesh, inference_tp, changes
):
    iteration, program = compiled("generate", mesh, inference_tp, **changes)
    body = program.module.body(checks.decode_loop(program.module))
    sizes = [prod(shape) for shape in (*weight_shapes(iteration), cache_shape(iteration))]
    assert checks.copies(program.module, body, sizes) == []


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), PROGRAMS)
def test_nothing_goes_to_the_host_but_whether_to_go_on(
    compiled: Compile, mesh, inference_tp, changes
):
    _, program = compiled("generate", mesh, inference_tp, **changes)
    module = program.module
    assert module.host_transfers() == []
    (condition,) = checks.decode_loop(module).called["condition"]
    assert [str(array) for array in module.computations[condition].root.arrays] == ["pred[]"]


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), PROGRAMS)
def test_a_token_is_one_graph(compiled: Compile, mesh, inference_tp, changes):
    """With the sums over devices in it, where they share layers."""
    _, program = compiled("generate", mesh, inference_tp, **changes)
    assert checks.graphs(checks.decode_launches(program.thunks)) == {GRAPH: 1}


def test_what_graphs_hold_is_the_user_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, alone = (generate_layout(OPT, mesh_of_h200s("2x1", n)) for n in (2, 1))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert graph_options(layout) == WITH_SUMS
    assert graph_options(alone) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert graph_options(layout) is None


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), ALONE)
def test_a_layer_of_a_token_is_seven_kernels(compiled: Compile, mesh, inference_tp, changes):
    """Four products, attention, and two residual sums with the next norm: from one layer's
    attention to the next one's; and the sum of what several programs found in one row's cache. In
    front of two products with matrices in int8 rows are split into digits; the norms in front of
    the other two write digits.
    """
    iteration, program = compiled("generate", mesh, inference_tp, **changes)
    kernels = [
        one.text
        for launch in checks.decode_launches(program.thunks)
        for one in launch.walk()
        if one.kind in ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul")
    ]
    starts = [n for n, text in enumerate(kernels) if text.startswith("decode_attention")]
    assert len(starts) == iteration.actor.num_layers == 2
    layer = kernels[starts[0] : starts[1]]
    assert sum(text.startswith("add_norm") for text in layer) == 2
    num_digits = sum(text.startswith("int8_digits") for text in layer)
    assert num_digits == (2 if changes.get("weights") == "int8" else 0)
    splits = re.search(r"grid: \[\d+, \d+, (\d+)\]", layer[0])
    assert splits is not None
    assert len(layer) == 7 + num_digits + (int(splits[1]) > 1), layer


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), SPREAD)
def test_a_tensor_parallel_token_is_two_sums_a_layer(
    compiled: Compile, mesh, inference_tp, changes
):
    """Of `[B, D]` in bfloat16, and one for the embedding, whose rows are spread by vocabulary.
    The only other thing of size is the choice of a token.
    """
    iteration, program = compiled("generate", mesh, inference_tp, **changes)
    module, cfg = program.module, iteration.actor
    found = module.collectives(module.body(checks.decode_loop(module)))
    hidden = f"bf16[{local_rows(iteration)},{cfg.width}]"
    sums = [one for one in found if [str(array) for array in one.arrays] == [hidden]]
    assert {one.kind for one in sums} == {"all-reduce"}
    assert len(sums) == 2 * cfg.num_layers + 1
    rest = [one for one in found if one not in sums]
    assert sum(one.num_bytes for one in rest) <= 4 * local_rows(iteration) * cfg.padded_vocab + 64


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), ALONE)
def test_devices_that_decode_alone_exchange_only_whether_to_go_on(
    compiled: Compile, mesh, inference_tp, changes
):
    _, program = compiled("generate", mesh, inference_tp, **changes)
    module = program.module
    assert module.collectives(module.body(checks.decode_loop(module))) == []


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), PROGRAMS)
def test_weights_are_gathered_once_in_bfloat16_or_not_at_all(
    compiled: Compile, mesh, inference_tp, changes
):
    """Not at all where STORE and GENERATE agree: one device, or decoding over all of them."""
    iteration, program = compiled("generate", mesh, inference_tp, **changes)
    store, rollout = iteration.engine.store, iteration.engine.rollout
    expected = [
        rollout.param_sharding(spec).shard_shape(spec.shape)
        for spec in jax.tree.leaves(param_specs(iteration.actor), is_leaf=is_spec)
        if store.spec(*spec.axes) != rollout.spec(*spec.axes)
    ]
    assert bool(expected) == (mesh == "8x1" and inference_tp < 8)
    found = program.module.collectives()
    gathered = [
        array
        for one in found
        if one.kind == "all-gather" and "params." in one.instruction.origin
        for array in one.arrays
    ]
    assert {array.dtype for array in gathered} <= {"bf16"}
    assert checks.by_size(gathered) == checks.by_size(expected)
    assert checks.moved(found, ("all-gather", "all-reduce")) == []


@pytest.mark.parametrize(("mesh", "inference_tp", "changes"), PROGRAMS)
def test_generation_needs_the_memory_that_is_planned(
    compiled: Compile, mesh, inference_tp, changes
):
    """Weights, and what the program holds beside them: to a tenth of both together, to a quarter
    where the shards of two layers are so small that partial sums of matrix products count.
    """
    iteration, program = compiled("generate", mesh, inference_tp, **changes)
    plan = iteration.plan
    planned = plan.held["actor"]["weights"] + plan.programs["generate"]
    assert program.memory.total == pytest.approx(planned, rel=0.25 if inference_tp == 8 else 0.1)
