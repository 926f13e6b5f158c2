"""How many rows decode at once follows from the plan's bytes, and the run says so."""

import re
from dataclasses import replace

import pytest

from meshes.layout import parse_mesh
from rlhf_jax.models.opt import SIZES
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import GIB, Models, Place, check_memory, plan_stage
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.rollout_slots import fit_slots

ACTOR, CRITIC = SIZES["facebook/opt-1.3b"], SIZES["facebook/opt-350m"]
MODELS = Models(ACTOR, CRITIC, CRITIC)
ONE = Place(parse_mesh("1x1"))
BATCH = 512
CFG = TrainConfig(
    dtype="bfloat16",
    ppo=PPOConfig(batch_size=BATCH, minibatch_size=32, remat="full"),
)
A_ROW = 2 * 24 * 2048 * 512 * 2
"""Keys and values of one row of 256 + 256 tokens, by hand: layers, width, positions, bfloat16."""


def slots_in(gib: float, place: Place = ONE, cfg: TrainConfig = CFG) -> int | None:
    return fit_slots(cfg, MODELS, place, int(gib * GIB)).ppo.rollout_slots


def test_all_rows_decode_at_once_where_they_fit(capsys) -> None:
    need = plan_stage(CFG, "ppo", MODELS, ONE).peak
    assert need > BATCH * A_ROW
    assert fit_slots(CFG, MODELS, ONE, need + 2**20) is CFG
    assert fit_slots(CFG, MODELS, ONE, None) is CFG
    assert not capsys.readouterr().out


@pytest.mark.parametrize("gib", [60, 50, 40])
def test_otherwise_as_many_as_fit_do(gib: int, capsys) -> None:
    """Eight rows more would not fit; what is found passes the check that all rows fail."""
    fitted = fit_slots(CFG, MODELS, ONE, gib * GIB)
    found = fitted.ppo.rollout_slots
    assert found is not None
    assert found % 8 == 0
    said = capsys.readouterr().out
    assert re.search(rf"512 rows at once need 49\.7 GiB .* {found} decode", said)
    check_memory(fitted, "ppo", MODELS, ONE, gib * GIB)
    with pytest.raises(ValueError, match="most in generate"):
        check_memory(CFG, "ppo", MODELS, ONE, gib * GIB)
    room = gib * GIB - plan_stage(fitted, "ppo", MODELS, ONE).resident
    more = replace(CFG, ppo=replace(CFG.ppo, rollout_slots=found + 8))
    assert plan_stage(more, "ppo", MODELS, ONE).programs["generate"] > room
    assert 0.8 < found * A_ROW / room <= 1


def test_slots_that_were_asked_for_are_the_most(capsys) -> None:
    cfg = replace(CFG, ppo=replace(CFG.ppo, rollout_slots=128))
    assert slots_in(100, cfg=cfg) == 128
    assert not capsys.readouterr().out
    found = slots_in(34, cfg=cfg)
    assert found == slots_in(34)
    assert found is not None
    assert found < 128


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_prompts_of_fewer_slots_than_devices_are_planned(platform: str) -> None:
    """They are read one at a time here, by heads: training would cut rows."""
    cfg = replace(CFG, ppo=replace(CFG.ppo, rollout_slots=8))
    assert slots_in(1000, Place(parse_mesh("8x1"), 8, platform), cfg) == 8


def test_every_share_of_the_batch_has_as_many() -> None:
    place = Place(parse_mesh("4x1"), inference_tp=1)
    found = slots_in(15, place)
    assert found is not None
    assert found % 32 == 0


def test_slots_that_do_not_divide_are_refused_before_anything_is_loaded() -> None:
    cfg = replace(CFG, ppo=replace(CFG.ppo, rollout_slots=6))
    with pytest.raises(ValueError, match=r"=6 does not divide over the 4 parts .* multiple of 4"):
        slots_in(100, Place(parse_mesh("4x2"), inference_tp=2), cfg)


def test_where_not_even_one_row_fits_the_plan_says_what_would() -> None:
    cfg = fit_slots(CFG, MODELS, ONE, 20 * GIB)
    assert cfg is CFG
    with pytest.raises(ValueError, match="and 20.0 are there: "):
        check_memory(cfg, "ppo", MODELS, ONE, 20 * GIB)
