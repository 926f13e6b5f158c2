"""How many devices share a model that decodes: whole weights where sums cost more than reading."""

from dataclasses import replace

import pytest

from meshes.layout import parse_mesh
from rlhf_jax.models.opt import SIZES
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.inference_tp import choose_inference_tp, step_seconds
from rlhf_jax.stages.memory_plan import GIB, Models, Place, plan_stage
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.rollout_slots import fit_slots

CRITIC = SIZES["facebook/opt-350m"]
CFG = TrainConfig(
    step=(3,), dtype="bfloat16", ppo=PPOConfig(batch_size=512, minibatch_size=64, remat="auto")
)


def chosen(
    name: str, mesh: str, gib: float | None = 1000, platform: str = "gpu", cfg: TrainConfig = CFG
) -> int:
    models = Models(SIZES[name], CRITIC, CRITIC)
    limit = None if gib is None else int(gib * GIB)
    return choose_inference_tp(cfg, models, parse_mesh(mesh), platform, limit)


def test_a_step_costs_its_weights_and_two_sums_a_layer() -> None:
    """By hand: 1.3 billion parameters of two bytes, 4 TB/s, 24 layers. Two devices with 64 rows
    each add up 128 rows of 2048 numbers of two bytes, and each receives as much.
    """
    opt, weights = SIZES["facebook/opt-1.3b"], 2 * 1.316e9 / 4e12
    assert step_seconds(opt, 1, 2, 64) == pytest.approx(weights, rel=1e-3)
    sums = 48 * (20e-6 + 128 * 2048 * 2 / 250e9)
    assert step_seconds(opt, 2, 2, 64) == pytest.approx(weights / 2 + sums, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "mesh", "batch", "expected"),
    [
        ("facebook/opt-1.3b", "2x1", 128, 1),
        ("facebook/opt-1.3b", "8x1", 512, 1),
        ("facebook/opt-1.3b", "4x2", 512, 2),  # there are sums in any case
        ("facebook/opt-6.7b", "2x1", 512, 1),
        ("facebook/opt-13b", "2x1", 128, 2),
        ("facebook/opt-13b", "8x1", 512, 4),  # eight read less and add up more
        ("facebook/opt-13b", "8x1", 64, 8),
    ],
)
def test_small_models_decode_whole_and_large_ones_in_parts(name, mesh, batch, expected) -> None:
    ppo = replace(CFG.ppo, batch_size=batch, minibatch_size=None)
    assert chosen(name, mesh, cfg=replace(CFG, ppo=ppo)) == expected


def test_weights_of_one_byte_are_read_as_such() -> None:
    """Of OPT-13B 3.2 ms whole, 1.6 and 1.8 of sums by two devices."""
    ppo = replace(CFG.ppo, batch_size=128, minibatch_size=None, rollout_weights="int8")
    assert chosen("facebook/opt-13b", "2x1", cfg=replace(CFG, ppo=ppo)) == 1


@pytest.mark.parametrize(("slots", "mesh", "expected"), [
    (8, "8x1", 1), (4, "8x1", 8), (4, "2x4x1", 4), (512, "2x1", 1),
])  # fmt: skip
def test_slots_that_are_asked_for_divide_over_the_shares(slots, mesh, expected) -> None:
    cfg = replace(CFG, ppo=replace(CFG.ppo, rollout_slots=slots))
    name, shape = "facebook/opt-1.3b", parse_mesh(mesh)
    size = chosen(name, mesh, cfg=cfg)
    assert size == expected
    assert fit_slots(cfg, Models(SIZES[name], CRITIC), Place(shape, size), 1000 * GIB) == cfg


def test_a_pinned_copy_has_room_while_answers_are_scored() -> None:
    """Where that needs more than decoding in few slots."""
    ppo = replace(CFG.ppo, remat="full", pin_rollout=True, rollout_slots=8)
    cfg, models = replace(CFG, ppo=ppo), Models(SIZES["facebook/opt-1.3b"], CRITIC, CRITIC)
    plan = plan_stage(cfg, "ppo", models, Place(parse_mesh("2x1"), 1))
    assert plan.programs["generate"] < plan.programs["score"]
    assert plan.peak == plan.resident + plan.programs["score"]
    needs = plan.peak / GIB
    assert chosen("facebook/opt-1.3b", "2x1", needs + 0.01, cfg=cfg) == 1
    assert chosen("facebook/opt-1.3b", "2x1", needs - 0.01, cfg=cfg) == 2


def test_what_does_not_fit_whole_is_shared() -> None:
    models = Models(SIZES["facebook/opt-1.3b"], CRITIC, CRITIC)
    full = replace(CFG, ppo=replace(CFG.ppo, remat="full"))

    def generating(size: int) -> float:
        plan = plan_stage(full, "ppo", models, Place(parse_mesh("8x1"), size))
        return (plan.resident + plan.programs["generate"]) / GIB

    needs = [generating(size) for size in (1, 2, 4, 8)]
    assert needs[0] > max(needs[1:])
    assert chosen("facebook/opt-1.3b", "8x1", needs[0] + 0.01) == 1
    # Of what fits the fastest: two add up the fewest rows, four hold the least.
    assert chosen("facebook/opt-1.3b", "8x1", needs[0] - 0.01) == 2
    assert needs[2] < min(needs[1], needs[3])
    assert chosen("facebook/opt-1.3b", "8x1", needs[2] + 0.01) == 4
    assert chosen("facebook/opt-1.3b", "8x1", min(needs) - 0.01) == 8


@pytest.mark.parametrize(("gib", "platform"), [(None, "gpu"), (1000, "cpu")])
def test_where_costs_are_not_known_it_is_the_largest(gib, platform) -> None:
    assert chosen("facebook/opt-1.3b", "8x1", gib, platform) == 8


def test_without_step_3_nothing_decodes() -> None:
    assert chosen("facebook/opt-1.3b", "8x1", cfg=TrainConfig(step=(1,))) == 8


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert chosen("facebook/opt-1.3b", "8x1", cfg=replace(CFG, inference_tp_size=4)) == 4
    with pytest.raises(ValueError, match="--inference-tp-size=3 does not fit --mesh=8x1"):
        chosen("facebook/opt-1.3b", "8x1", cfg=replace(CFG, inference_tp_size=3))
