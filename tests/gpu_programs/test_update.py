"""Update and scoring as an H200 would run them, alone and on 8 of them."""

from math import prod
from typing import Any

import jax
import pytest

from meshes.axes import TP
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import (
    compute_layout,
    is_spec,
    param_specs,
    scalar_specs,
    store_layout,
)
from rlhf_jax.models.scoring import CHUNK
from tests.gpu_programs import checks
from tests.gpu_programs.conftest import Compile
from tests.gpu_programs.programs import Iteration, Rows

pytestmark = pytest.mark.gpu_programs

LAYOUTS = [pytest.param("8x1", 8, id="8x1"), pytest.param("4x2", 2, id="4x2")]
MESHES = [pytest.param("1x1", 1, id="1x1"), *LAYOUTS]
FLOAT32, BFLOAT16 = 4, 2
PASSES = {"update": 2, "score": 1}
"""How often a layer's weights are used apart from another: the backward pass computes it anew."""


def trained(iteration: Iteration) -> list[tuple[Any, ModelConfig]]:
    """Declarations and config of actor and critic."""
    return [
        (param_specs(iteration.actor), iteration.actor),
        (scalar_specs(iteration.critic), iteration.critic),
    ]


def models(name: str) -> tuple[int, int]:
    """How many models of the actor's and of the critic's sizes a program reads."""
    return {"update": (1, 1), "score": (1, 2)}[name]


def stored_shards(iteration: Iteration) -> list[tuple[int, ...]]:
    """One device's shards of all sharded parameters that train."""
    return [
        shape
        for specs, cfg in trained(iteration)
        for store in [store_layout(cfg, iteration.mesh)]
        for shape in checks.local_shapes(specs, store, sharded_in=store)
    ]


def gathered_weights(iteration: Iteration, name: str) -> list[tuple[int, ...]]:
    """What a device gathers of actor (or reference) and critic (and reward model): layers once in
    each pass, the rest once.
    """
    found = []
    for count, (specs, cfg) in zip(models(name), trained(iteration), strict=True):
        store, compute = store_layout(cfg, iteration.mesh), compute_layout(cfg, iteration.mesh)
        body = getattr(specs, "body", specs)
        layers = checks.local_shapes(body.layers, compute, sharded_in=store)
        outer = checks.local_shapes(body.embed_VW, compute, sharded_in=store)
        found += count * (PASSES[name] * layers + outer)
    return found


@pytest.mark.parametrize("name", ["update", "score"])
def test_attention_is_cudnns_and_no_matrix_of_scores_exists(compiled: Compile, name: str):
    iteration, program = compiled(name)
    layers = iteration.actor.num_layers + iteration.critic.num_layers
    if name == "score":
        layers += iteration.critic.num_layers
    calls = checks.attention_calls(program.module)
    backward = [one for one in calls if one.target and "Backward" in one.target]
    assert len(backward) == (layers if name == "update" else 0)
    assert len(calls) - len(backward) == PASSES[name] * layers
    assert checks.quadratic(program.module, iteration.rows.length) == []


@pytest.mark.parametrize("name", ["update", "score"])
def test_logits_exist_for_a_chunk_of_positions(compiled: Compile, name: str):
    iteration, program = compiled(name)
    cfg, rows = iteration.actor, iteration.rows
    tables = max(CHUNK, cfg.embed_width)
    assert rows.batch * rows.answer > tables, "all logits must be larger than the embedding"
    assert checks.logits(program.module, [cfg.padded_vocab], tables * cfg.padded_vocab) == []


@pytest.mark.parametrize(("mesh", "inference_tp"), MESHES)
def test_the_old_state_is_given_to_the_new_one(compiled: Compile, mesh: str, inference_tp: int):
    """Every array of both states, and all of their bytes."""
    iteration, program = compiled("update", mesh, inference_tp)
    leaves = jax.tree.leaves(iteration.states())
    size = sum(
        leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape) if leaf.ndim else ())
        for leaf in leaves
    )
    assert program.module.num_aliased >= len(leaves)
    assert program.memory.aliased >= size


def test_parts_of_a_batch_share_one_body(compiled: Compile):
    """A forward and a backward pass a layer for four parts, as for one."""
    _, whole = compiled("update")
    _, parts = compiled("update", parts=4)
    counts = [len(checks.attention_calls(program.module)) for program in (whole, parts)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["update", "score"])
@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_weights_are_gathered_layer_by_layer_in_bfloat16(
    compiled: Compile, mesh: str, inference_tp: int, name: str
):
    """Every weight once in each pass over its layer, and nothing else of size: no logits, no
    activations.
    """
    iteration, program = compiled(name, mesh, inference_tp)
    gathered = checks.large(program.module.collectives(), "all-gather")
    assert {array.dtype for array in gathered} == {"bf16"}
    expected = checks.by_size(gathered_weights(iteration, name))
    assert checks.by_size(gathered) == {
        size: count for size, count in expected.items() if 2 * size >= checks.SMALL
    }


@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_gradients_are_scattered_as_they_are_summed(
    compiled: Compile, mesh: str, inference_tp: int
):
    """Each sharded parameter's gradient leaves in one reduce-scatter, in bfloat16."""
    iteration, program = compiled("update", mesh, inference_tp)
    scattered = checks.large(program.module.collectives(), "reduce-scatter")
    assert {array.dtype for array in scattered} == {"bf16"}
    expected = checks.by_size(stored_shards(iteration))
    assert checks.by_size(scattered) == {
        size: count for size, count in expected.items() if 2 * size >= checks.SMALL
    }


@pytest.mark.parametrize("name", ["update", "score"])
@pytest.mark.parametrize(("mesh", "inference_tp"), LAYOUTS)
def test_only_activations_and_whole_parameters_are_all_reduced(
    compiled: Compile, mesh: str, inference_tp: int, name: str
):
    """Without tensor parallelism gradients of what every device has whole; with it also `[B, T, D]`
    of each half of a layer.
    """
    iteration, program = compiled(name, mesh, inference_tp)
    found = program.module.collectives()
    reduced = sum(array.num_bytes for array in checks.large(found, "all-reduce"))
    assert checks.moved(found, ("all-gather", "all-reduce", "reduce-scatter")) == []
    assert reduced <= allowed_sums(iteration, name)


def allowed_sums(iteration: Iteration, name: str) -> int:
    """Bytes: replicated parameters' gradients, and of a tensor-parallel layer two activations
    forward, two again where the layer is computed anew, and two backward; and one each for the
    embedding's rows, for the head's hidden states and for the window of the answer.
    """
    rows, training = iteration.rows, name == "update"
    devices = iteration.engine.compute.batch_size_divisor
    spread = dict(iteration.mesh.shape)[TP] > 1
    total = 0
    for count, (specs, cfg) in zip(models(name), trained(iteration), strict=True):
        store = store_layout(cfg, iteration.mesh)
        leaves = jax.tree.leaves(specs, is_leaf=is_spec)
        whole = [spec.shape for spec in leaves if not any(store.spec(*spec.axes))]
        total += training * FLOAT32 * sum(map(prod, whole))
        hidden = BFLOAT16 * rows.batch // devices * rows.length * cfg.width
        total += spread * count * hidden * ((6 if training else 2) * cfg.num_layers + 3)
    return total


@pytest.mark.parametrize("name", ["update", "score"])
@pytest.mark.parametrize(("mesh", "inference_tp"), MESHES)
def test_memory_stays_within_the_plan(compiled: Compile, mesh: str, inference_tp: int, name: str):
    """Arguments and temporary memory together are at most a tenth above it. It is too high where a
    device has few rows: it counts the float32 gradient of the unembedding, which one chunk of
    logits does not need, and in scoring logits twice.
    """
    iteration, program = compiled(name, mesh, inference_tp)
    plan = iteration.plan
    if name == "update":
        held = sum(sum(plan.held[owner].values()) for owner in ("actor", "critic"))
    else:
        held = sum(plan.held[owner]["weights"] for owner in ("reference", "critic", "reward"))
    share = program.memory.total / (held + plan.programs[name])
    assert (0.75 if mesh == "1x1" else 0.5) <= share <= 1.1


def test_the_plan_is_right_where_eight_devices_are_full(compiled: Compile):
    """Each has 16 rows of 512 tokens: logits and the unembedding's gradient fill their room."""
    iteration, program = compiled("update", "8x1", 8, rows=Rows(128, 256, 256))
    plan = iteration.plan
    held = sum(sum(plan.held[owner].values()) for owner in ("actor", "critic"))
    assert 0.95 <= program.memory.total / (held + plan.programs["update"]) <= 1.05
