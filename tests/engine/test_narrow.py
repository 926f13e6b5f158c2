"""Rollouts in one byte a number: what is recorded is the policy that was sampled."""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any, override

import jax
import ml_dtypes
import numpy as np
import pytest

from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.adapted import is_adapted
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRAConfig, adapted_specs
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.params import LayerParams, param_specs
from tests.engine.drive import Driver, prompts, to_numpy
from tests.models.cases import LLAMA, OPT, put_params, random_values

R = 6
SAMPLED = SamplingConfig(max_new_tokens=R, temperature=0.7)
GATED = replace(LLAMA, num_layers=1)
STOPS = tuple(range(3, 17))


def rounded(weight: np.ndarray, kind: Narrow) -> np.ndarray:
    """What one byte a number can hold of a matrix, one scale a row."""
    most, dtype = {"int8": (127.0, np.int8), "fp8": (448.0, ml_dtypes.float8_e4m3fn)}[kind]
    largest = np.abs(weight).max(1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(most), 1).astype(np.float32)
    values = weight / scale
    return scale * (np.round(values) if kind == "int8" else values).astype(dtype).astype(np.float32)


@dataclass(frozen=True)
class Widened(Driver):
    """A model whose layers hold in float32 what one byte a number can hold."""

    kind: Narrow = "int8"

    @override
    def actor(self, seed: int = 1) -> Any:
        specs = param_specs(self.cfg)
        values = random_values(specs, seed=seed)

        def one(layer: LayerParams[Any]) -> LayerParams[Any]:
            return jax.tree.map(lambda x: rounded(x, self.kind) if x.ndim > 1 else x, layer)

        values = replace(values, layers=[one(layer) for layer in values.layers])
        return put_params(values, specs, self.store, self.dtype)


@functools.cache
def rollout_of(
    cfg: ModelConfig, mesh: str, tp: int, slots: int | None, weights: Narrow, kv_cache: Narrow
) -> Rollout:
    driver = Driver(cfg, mesh, tp, STOPS, slots=slots, weights=weights, kv_cache=kv_cache)
    return driver.generate(SAMPLED)


def on_one_device(cfg: ModelConfig, weights: Narrow, kv_cache: Narrow = "same") -> Rollout:
    return rollout_of(cfg, "1x1", 1, None, weights, kv_cache)


def real(rollout: Rollout) -> np.ndarray:
    return np.arange(R) < rollout.lengths_B[:, None]


@pytest.mark.parametrize(("cfg", "kind"), [(OPT, "int8"), (OPT, "fp8"), (GATED, "int8")])
def test_log_probabilities_are_those_of_the_rounded_model(cfg, kind):
    """A pass over whole rows of the model that the bytes stand for; and not of the model itself."""
    rollout = on_one_device(cfg, kind)
    there = real(rollout)
    own = Widened(cfg, kind=kind).logprobs(rollout, prompts(), SAMPLED.temperature)
    np.testing.assert_allclose(rollout.logprobs_BR[there], own[there], rtol=2e-4, atol=2e-4)
    plain = Driver(cfg).logprobs(rollout, prompts(), SAMPLED.temperature)
    mismatch = np.abs(rollout.logprobs_BR - plain)[there].mean()
    assert 1e-3 < mismatch < (0.05 if kind == "int8" else 0.3)


def assert_same(got: Rollout, expected: Rollout) -> None:
    np.testing.assert_array_equal(got.tokens_BR, expected.tokens_BR)
    np.testing.assert_allclose(got.logprobs_BR, expected.logprobs_BR, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("cfg", "mesh", "tp", "slots", "weights", "kv_cache"),
    [
        (OPT, "4x2", 2, None, "int8", "same"),
        (OPT, "4x2", 4, 4, "int8", "int8"),
        (OPT, "1x1", 1, 4, "same", "fp8"),
        (GATED, "4x1", 1, None, "fp8", "int8"),
    ],
)
def test_neither_mesh_nor_slots_change_an_answer(cfg, mesh, tp, slots, weights, kv_cache):
    """Every device rounds its own rows and heads."""
    got = rollout_of(cfg, mesh, tp, slots, weights, kv_cache)
    assert_same(got, on_one_device(cfg, weights, kv_cache))


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.01), ("fp8", 0.05)])
def test_a_rounded_cache_moves_log_probabilities_a_little(kind, most):
    """First tokens not at all: prefill attends to what it computes."""
    rollout = on_one_device(OPT, "same", kind)
    plain = Driver(OPT).logprobs(rollout, prompts(), SAMPLED.temperature)
    difference = np.where(real(rollout), np.abs(rollout.logprobs_BR - plain), 0)
    assert difference[:, 0].max() < 1e-4
    assert 1e-4 < difference[:, 1:].sum() / real(rollout)[:, 1:].sum() < most


def test_a_pinned_copy_is_rounded_once():
    driver = Driver(OPT, "4x2", 2, STOPS, weights="int8")
    pinned: Any = driver.engine.pin(driver.actor())
    assert pinned.layers[0].up_FD.values_FD.dtype == np.int8
    again = driver.engine.generate(pinned, prompts(), SAMPLED, key=jax.random.key(5))
    assert_same(to_numpy(again), on_one_device(OPT, "int8"))


def test_adapters_stay_as_they_are_beside_rounded_weights():
    driver = Driver(OPT, stop_ids=STOPS, weights="int8")
    specs = adapted_specs(param_specs(OPT), OPT, LoRAConfig(dim=2))
    values = random_values(specs, seed=1)
    rollout = to_numpy(
        driver.engine.generate(
            put_params(values, specs, driver.store), prompts(), SAMPLED, key=jax.random.key(5)
        )
    )
    assert real(rollout).sum() > 10

    def round_base(node: Any) -> Any:
        return replace(node, base_FD=rounded(node.base_FD, "int8")) if is_adapted(node) else node

    base = jax.tree.map(round_base, values.layers, is_leaf=is_adapted)
    plain = Driver(OPT, stop_ids=STOPS)
    expected = plain.engine.generate(
        put_params(replace(values, layers=base), specs, plain.store), prompts(), SAMPLED,
        key=jax.random.key(5),
    )  # fmt: skip
    assert_same(rollout, to_numpy(expected))


@pytest.mark.parametrize("kind", ["same", "int8", "fp8"])
def test_only_what_is_asked_for_has_one_byte(kind):
    driver = Driver(OPT, stop_ids=STOPS, weights=kind)
    with jax.set_mesh(driver.engine.mesh):
        program = driver.engine._generate(SAMPLED)
        traced = program.trace(driver.actor(), prompts(), key=jax.random.key(0))
    found = re.findall(r"\b(i8|f8_\w+)\[", str(traced.jaxpr))
    assert set(found) == {"same": set(), "int8": {"i8"}, "fp8": {"f8_e4m3fn"}}[kind]
