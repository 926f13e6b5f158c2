"""The plan of a stage: what it counts, by hand, and what it offers where a stage does not fit."""

import re
from dataclasses import replace
from typing import Any

import pytest

from meshes.layout import parse_mesh
from rlhf_jax.cli.parse import parse
from rlhf_jax.engine.ema import EMAConfig
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import (
    GIB,
    Models,
    Place,
    check_memory,
    plan_stage,
)
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.rollout_slots import fit_slots
from rlhf_jax.stages.supervised_config import DPOConfig, SFTConfig

ACTOR, CRITIC = SIZES["facebook/opt-1.3b"], SIZES["facebook/opt-350m"]
MODELS = Models(ACTOR, CRITIC, CRITIC)
ONE = Place(parse_mesh("1x1"))
BOTH = 1 + CRITIC.num_params() / ACTOR.num_params()
"""Of what the critic has too, for each parameter of the actor."""


def config(**changes) -> TrainConfig:
    return TrainConfig(ppo=PPOConfig(**changes))


def test_the_state_of_ppo_is_sixteen_bytes_a_parameter_and_two_a_frozen_one() -> None:
    """Weights 2, master 4, moments 8; gradients are part of the update. Padding is below 1 %."""
    plan = plan_stage(config(), "ppo", MODELS, ONE)
    trained, frozen = 14, 2
    expected = (trained + frozen) * (ACTOR.num_params() + CRITIC.num_params())
    assert plan.resident == pytest.approx(expected, rel=0.01)


def test_more_devices_hold_a_share_each() -> None:
    one = plan_stage(config(), "ppo", MODELS, ONE)
    eight = plan_stage(config(), "ppo", MODELS, Place(parse_mesh("8x1")))
    # Position tables and norms are whole on every device.
    assert eight.resident == pytest.approx(one.resident / 8, rel=0.04)


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter"),
    [
        ({"offload_reference_model": True}, -2),
        ({"frozen_dtype": "float32"}, 2),
        ({"ema": EMAConfig(enable=True)}, 4),
        ({"ema": EMAConfig(enable=True, offload=True)}, 0),
        ({"moments_dtype": "bfloat16"}, -4 * BOTH),
        ({"optim": "lion"}, -4 * BOTH),
        ({"optim": "lion", "moments_dtype": "bfloat16"}, -6 * BOTH),
        ({"offload": True}, -12 * BOTH),
    ],
    ids=[
        "offload",
        "float32",
        "average",
        "average on the host",
        "bfloat16 moments",
        "lion",
        "lion in bfloat16",
        "optimizers on the host",
    ],
)
def test_what_settings_add_to_the_actors_share(changes, bytes_a_parameter: float) -> None:
    models = replace(MODELS, reward=None)
    plain = plan_stage(config(), "ppo", models, ONE)
    changed = plan_stage(config(**changes), "ppo", models, ONE)
    expected = bytes_a_parameter * ACTOR.num_params()
    assert changed.resident - plain.resident == pytest.approx(expected, rel=0.01, abs=1)


def test_packing_plans_no_more_tokens_and_longer_rows_of_attention_scores() -> None:
    """Scores exist on a CPU alone; a token has them with up to 7 x 512 others."""
    plain, packed = (config(packing=each, remat="none") for each in (False, True))
    assert plan_stage(packed, "ppo", MODELS, ONE) == plan_stage(plain, "ppo", MODELS, ONE)
    cpu = replace(ONE, platform="cpu")
    without, found = (plan_stage(cfg, "ppo", MODELS, cpu) for cfg in (plain, packed))
    assert found.held == without.held
    for name in ("score", "update"):
        assert 5 < found.programs[name] / without.programs[name] < 7


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_a_pinned_copy_is_there_while_batches_are_scored(mesh: str) -> None:
    """Two bytes a parameter, on each of 8 devices too; where generation gathers, it has them
    without.
    """
    place, copy = Place(parse_mesh(mesh), inference_tp=1), 2 * ACTOR.num_params()
    without, found = (
        plan_stage(config(pin_rollout=each), "ppo", MODELS, place) for each in (False, True)
    )
    more = {name: size - without.programs[name] for name, size in found.programs.items()}
    assert found.held == without.held
    assert more["score"] == pytest.approx(copy, rel=0.01)
    assert more["generate"] == pytest.approx(copy if mesh == "1x1" else 0, abs=0.01 * copy)
    assert more["update"] == 0


def test_a_pinned_copy_is_given_up_first() -> None:
    pinned, without = (
        config(pin_rollout=each, batch_size=8, actor_lora=LoRAConfig(dim=8, only=True))
        for each in (True, False)
    )
    limit = plan_stage(without, "ppo", MODELS, ONE).peak
    with pytest.raises(ValueError, match=r"use --ppo\.no-pin-rollout or --mesh"):
        check_memory(pinned, "ppo", MODELS, ONE, limit)
    assert not parse(["--ppo.no-pin-rollout"]).ppo.pin_rollout


def test_adapters_alone_leave_one_copy_of_the_actor() -> None:
    lora = LoRAConfig(dim=8, only=True)
    plan = plan_stage(config(actor_lora=lora), "ppo", MODELS, ONE)
    assert plan.held["reference"] == {"weights": 0}
    assert sum(plan.held["actor"].values()) < 2.2 * ACTOR.num_params()


def test_adapters_alone_beside_int8_take_a_byte_a_parameter_of_the_layers() -> None:
    """Reference and reward model are the bases of actor and critic."""
    lora = LoRAConfig(dim=8, only=True, load_in_8bit=True)
    plan = plan_stage(config(actor_lora=lora, critic_lora=lora), "ppo", MODELS, ONE)
    assert plan.held["reference"] == {"weights": 0}
    outside = 2 * ACTOR.padded_vocab * ACTOR.width + 2 * ACTOR.position_rows * ACTOR.width
    layers = ACTOR.num_params() - outside // 2
    assert plan.held["actor"]["weights"] == pytest.approx(layers + outside, rel=0.02)
    wide = replace(lora, load_in_8bit=False)
    plain = plan_stage(config(actor_lora=wide, critic_lora=wide), "ppo", MODELS, ONE)
    assert plan.programs == plain.programs


def test_an_update_from_the_host_has_both_gradients_and_one_layer_at_a_time() -> None:
    plan = plan_stage(config(offload=True, batch_size=8), "ppo", MODELS, ONE)
    layer = 12 * ACTOR.width**2
    embedding = ACTOR.padded_vocab * ACTOR.width
    gradients = 2 * (ACTOR.num_params() + CRITIC.num_params())
    piece = max(layer, embedding) * 4 * 7  # masters, two moments, in and out; gradients
    assert plan.programs["apply"] == pytest.approx(gradients + piece, rel=0.01)


def test_int8_is_offered_where_adapters_do_not_fit() -> None:
    cfg = config(actor_lora=LoRAConfig(dim=8, only=True), batch_size=8, offload_reward_model=True)
    least = plan_stage(cfg, "ppo", MODELS, ONE).least
    with pytest.raises(ValueError, match=r"--ppo\.actor-lora\.load-in-8bit"):
        check_memory(cfg, "ppo", MODELS, ONE, least - int(0.5 * GIB))


def test_settings_that_are_offered_are_flags_and_fit() -> None:
    """They are parsed as a command line would be, and planned again, as a run does it."""
    cfg, limit = config(batch_size=256), 22 * GIB
    said = r"^ppo needs about .* and 22\.0 are there: use --ppo"
    with pytest.raises(ValueError, match=said) as error:
        check_memory(cfg, "ppo", MODELS, ONE, limit)
    flags = str(error.value).split("use ")[1].split(" or ")[0].split()
    changed = parse(["--ppo.batch-size=256", "--ppo.remat=full", "--dtype=bfloat16", *flags])
    assert changed.ppo.offload_reference_model
    fitted = fit_slots(changed, MODELS, ONE, limit)
    assert plan_stage(fitted, "ppo", MODELS, ONE).peak <= limit


def test_a_mesh_that_is_offered_fits() -> None:
    cfg, limit = TrainConfig(sft=SFTConfig(batch_size=64)), 12 * GIB
    with pytest.raises(ValueError, match="--mesh=") as error:
        check_memory(cfg, "sft", MODELS, ONE, limit)
    (mesh,) = re.findall(r"--mesh=(\S+)", str(error.value))
    assert plan_stage(cfg, "sft", MODELS, Place(parse_mesh(mesh))).peak <= limit


@pytest.mark.parametrize(("mesh", "size", "slots"), [("4x1", 1, None), ("2x2x1", 2, 24)])
def test_a_mesh_that_is_offered_fits_what_decoding_was_asked_for(
    mesh: str, size: int, slots: int | None
) -> None:
    """Its tensor parallelism, and its slots, which all parts of a batch share."""
    ppo = PPOConfig(batch_size=64, rollout_slots=slots)
    cfg, limit = TrainConfig(inference_tp_size=size, ppo=ppo), 4 * GIB
    with pytest.raises(ValueError, match="ppo needs") as error:
        check_memory(cfg, "ppo", MODELS, Place(parse_mesh(mesh), size), limit)
    offered = re.findall(r"--mesh=(\S+)", str(error.value))
    assert bool(offered) == (slots is None)
    for larger in offered:
        there = Place(parse_mesh(larger), size)
        check_memory(fit_slots(cfg, MODELS, there, limit), "ppo", MODELS, there, limit)


def test_the_mildest_change_is_offered_first() -> None:
    """A batch that only has to be cut up: nothing else is given up."""
    cfg = TrainConfig(sft=SFTConfig(batch_size=512, remat="dots"))
    limit = 40 * GIB
    with pytest.raises(ValueError, match=r"use --sft\.gradient-accumulation-steps=\d+ or --mesh"):
        check_memory(cfg, "sft", MODELS, ONE, limit)


def test_what_fits_is_not_refused_and_a_cpu_refuses_nothing() -> None:
    assert check_memory(config(), "ppo", MODELS, ONE, 100 * GIB).peak < 100 * GIB
    assert check_memory(config(), "ppo", MODELS, ONE, None).table(None)


def test_what_nothing_makes_fit_is_said() -> None:
    models = Models(SIZES["facebook/opt-175b"])
    cfg = TrainConfig(sft=SFTConfig(batch_size=1))
    with pytest.raises(ValueError, match="no setting or mesh makes it fit"):
        check_memory(cfg, "sft", models, ONE, 20 * GIB)


def test_the_table_names_owners_and_programs() -> None:
    text = plan_stage(config(), "ppo", MODELS, ONE).table(100 * GIB)
    assert text.startswith("ppo: memory about ")
    assert "GiB of 100.0 a device, most in generate" in text
    for word in ("actor", "critic", "reference", "reward", "masters", "moments", "generate"):
        assert word in text


def test_the_answers_of_step_dpo_to_held_out_prompts_are_counted() -> None:
    """A part of a batch at once, so that accumulation makes them smaller too."""

    def plan(**changes: Any) -> dict[str, int]:
        dpo = DPOConfig(batch_size=32, max_seq_len=1024, **changes)
        return plan_stage(TrainConfig(step=("dpo",), dpo=dpo), "dpo", MODELS, ONE).programs

    cache = 2 * 2 * ACTOR.num_layers * ACTOR.width * 1024 * 32
    whole, half = plan(), plan(gradient_accumulation_steps=2)
    assert whole["generate"] > cache
    assert cache / 2 < half["generate"] < 0.8 * whole["generate"]
    assert "generate" not in plan(num_eval_prompts=0)
