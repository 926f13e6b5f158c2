"""`remat=auto` becomes the least rematerialisation that fits, and says so."""

from dataclasses import replace

import pytest

from meshes.layout import parse_mesh
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.remat import Remat
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.fit_remat import fit_remat, most, with_remat
from rlhf_jax.stages.memory_plan import (
    GIB,
    Models,
    Place,
    check_memory,
    plan_stage,
    stage_settings,
)
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.rollout_slots import MIB
from rlhf_jax.stages.supervised_config import SFTConfig

CRITIC = SIZES["facebook/opt-350m"]
MODELS = Models(SIZES["facebook/opt-1.3b"], CRITIC, CRITIC)
ONE = Place(parse_mesh("1x1"))
CFG = TrainConfig(
    sft=SFTConfig(batch_size=32, remat="auto"), ppo=PPOConfig(batch_size=32, remat="auto")
)


def chosen(stage: StageName, limit: int | None) -> str:
    return stage_settings(fit_remat(CFG, stage, MODELS, ONE, limit), stage).remat


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_each_policy_is_chosen_from_where_it_fits_and_the_next_one_below(stage: StageName) -> None:
    order: list[Remat] = ["none", "dots", "mlp", "matrices", "full"]
    needs = [
        most(plan_stage(with_remat(CFG, stage, remat), stage, MODELS, ONE)) for remat in order[:-1]
    ]
    assert needs == sorted(needs, reverse=True)
    for remat, slower, need in zip(order, order[1:], needs, strict=False):
        assert chosen(stage, need + MIB) == remat
        assert chosen(stage, need - MIB) == slower


def test_what_is_chosen_passes_the_check(capsys: pytest.CaptureFixture) -> None:
    fitted = fit_remat(CFG, "ppo", MODELS, ONE, 45 * GIB)
    assert fitted.ppo.remat in ("mlp", "dots")
    assert f"ppo: remat=auto is {fitted.ppo.remat}, the update takes" in capsys.readouterr().out
    check_memory(fitted, "ppo", MODELS, ONE, 45 * GIB)


def test_devices_that_say_nothing_get_full_and_a_named_policy_stays() -> None:
    assert chosen("ppo", None) == "full"
    named = replace(CFG, ppo=replace(CFG.ppo, remat="mlp"))
    assert fit_remat(named, "ppo", MODELS, ONE, 500 * GIB) == named
