"""What `check_devices.py` and `bench_relayout.py` find equal is, and what is not they find."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from meshes.layout import MeshShape, check_inference_tp, make_mesh
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.memory import tree_bytes
from rlhf_jax.models.params import param_specs
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.stages.ppo_config import PPOConfig
from scripts.bench_relayout import arrives, made_up_weights, received_bytes, relayout
from scripts.check_devices import (
    LIMITS,
    Outcome,
    Place,
    check,
    compare,
    places,
    wanted_places,
)
from scripts.iteration_flops import Setting
from scripts.random_rows import random_answers

CFG = replace(quickstart_config(264, 257, 258, 256), num_layers=1, eos_token_id=None)
SETTING = Setting(
    CFG,
    CFG,
    PPOConfig(
        batch_size=8, max_prompt_seq_len=8, max_answer_seq_len=8, standardize_score=False,
        remat="full",
    ),
)  # fmt: skip


def outcome(**changes: Any) -> Outcome:
    made = Outcome(
        rollout=random_answers(SETTING),
        numbers={"values_BR": np.linspace(-1, 1, 8), "critic/grad_norm": np.asarray(2.0)},
        moments=([np.ones(4, np.float32)], [np.ones((2, 2), np.float32)]),
    )
    return replace(made, **changes)


def test_equal_steps_agree() -> None:
    for limits in LIMITS.values():
        agrees, cells = compare(outcome(), outcome(), limits)
        assert agrees
        assert cells.startswith("1.000 | 0.0e+00")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"numbers": {"values_BR": np.linspace(-1, 1.3, 8), "critic/grad_norm": 2.0}}, "values_BR"),
        ({"numbers": {"values_BR": np.linspace(-1, 1, 8), "critic/grad_norm": np.nan}}, "grad"),
        ({"moments": ([np.ones(4)], [np.full((2, 2), 1.2)])}, "2.0e-01"),
        ({"rollout": replace(random_answers(SETTING), tokens_BR=np.zeros((8, 8)))}, "0.000 |"),
    ],
)
def test_steps_that_differ_do_not(changes: dict[str, Any], named: str) -> None:
    for limits in LIMITS.values():
        agrees, cells = compare(outcome(**changes), outcome(), limits)
        assert not agrees
        assert named in cells


@pytest.mark.parametrize("num_devices", [2, 3, 4, 6, 8])
def test_every_place_fits_its_devices(num_devices: int) -> None:
    found = list(places(num_devices))
    for place in found:
        check_inference_tp(place.shape, place.inference_tp)
        assert place.shape.num_devices <= num_devices
    assert len(set(found)) == len(found)
    whole = {str(p.shape) for p in found if p.shape.num_devices == num_devices}
    assert {f"{num_devices}x1", f"1x{num_devices}"} <= whole
    sizes = {p.inference_tp for p in found if str(p.shape) == f"{num_devices}x1"}
    assert sizes == {n for n in range(1, num_devices + 1) if num_devices % n == 0}
    assert any(p.shape.replica > 1 for p in found) == (num_devices in (4, 6, 8))


def test_meshes_that_are_named_are_checked_and_no_others() -> None:
    """Not one of them may be left out in silence: no mesh would agree."""
    found = wanted_places(["2x2", "2x2x1"], SETTING)
    assert [(str(p.shape), p.inference_tp) for p in found] == [
        ("2x2", 2), ("2x2", 4), ("2x2x1", 1), ("2x2x1", 2),
    ]  # fmt: skip
    for mesh, message in [
        ("banana", "is not a mesh"),
        ("9x1", "asks for 9 devices, 8 are visible"),
        ("3x1", "shards a batch over 3 devices"),
    ]:
        with pytest.raises(ValueError, match=message):
            wanted_places(["8x1", mesh], SETTING)


def test_one_device_agrees_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="no other to agree with it"):
        wanted_places(None, SETTING)


@pytest.mark.slow
def test_devices_of_a_cpu_agree_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(SETTING, "float32", [Place(MeshShape(1, 4, 2), 4)])
    assert "| float32 | 4x2 | 4 | 1.000 |" in capsys.readouterr().out


def test_weights_arrive_where_they_belong() -> None:
    engine = HybridEngine(CFG, make_mesh(MeshShape(1, 4, 1), 2), ())
    with jax.set_mesh(engine.mesh):
        params = made_up_weights(param_specs(CFG), engine.store)
        wrong = replace(params, embed_VW=params.embed_VW + 1)
    assert arrives(engine, params)
    assert not arrives(engine, wrong)


def test_received_bytes_are_those_that_a_device_lacks() -> None:
    """4 devices cut all large weights. 6 cut those of 384 rows and store the others whole: of these
    they receive nothing, though two of them cut them for decoding.
    """
    specs, found = param_specs(CFG), []
    for devices in (4, 6):
        engine = HybridEngine(CFG, make_mesh(MeshShape(1, devices, 1), 2), ())
        stored, decoding = (tree_bytes(specs, at, 2) for at in (engine.store, engine.rollout))
        found.append((received_bytes(specs, engine), decoding - stored))
    (received, more), (received_of_6, more_of_6) = found
    assert received == more > 0
    embedding, qkv, qkv_bias = 384 * 128, 384 * 128, 384
    halves, sixths = ((embedding + qkv + qkv_bias) // n for n in (2, 6))
    assert received_of_6 == 2 * (halves - sixths) > 0 > more_of_6


def test_one_layout_moves_nothing() -> None:
    assert "| 0 | the layouts are one" in relayout(CFG, MeshShape(1, 4, 1), 4, 1)
