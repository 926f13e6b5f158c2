"""`--step 1 dpo` and DeepSpeed-Chat's names for it."""

import pytest

from rlhf_jax.cli import parse, to_yaml
from rlhf_jax.cli.parse import resolve


def test_the_step_is_read_and_written(tmp_path) -> None:
    config = parse(["--step", "1", "dpo"])
    assert config.step == (1, "dpo")
    assert config.stages == ("sft", "dpo")
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert parse([f"--config={tmp_path / 'run.yaml'}"]) == config
    assert parse(["--step=dpo"]).stages == ("dpo",)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("1 2 dpo", r"--step 1 2 dpo: dpo takes the place of steps 2 and 3: use --step 1 dpo"),
        ("dpo 3", "takes the place of steps 2 and 3"),
        ("dpo 1", "each stage once and in order, got dpo 1"),
        ("dpo dpo", "each stage once"),
        ("1 ppo", "--step takes any of 1 2 3, or dpo, got 1 ppo"),
    ],
)
def test_steps_that_do_not_go_together(steps: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(["--step", *steps.split()])


def test_deepspeed_chats_flags_of_dpo() -> None:
    flags = (
        "--step dpo --model_name_or_path 1.3b --per_device_train_batch_size 4 --mesh 8x1 --beta 0.2"
        " --gradient_accumulation_steps 2 --label_smoothing 0.1 --learning_rate 2e-6"
        " --offload_reference_model --gradient_checkpointing --max_seq_len 256"
    )
    config, notes = resolve(flags.split())
    dpo = config.dpo
    assert config.actor_model == "facebook/opt-1.3b"
    assert (dpo.batch_size, dpo.beta, dpo.label_smoothing) == (64, 0.2, 0.1)
    assert (dpo.learning_rate, dpo.max_seq_len, dpo.remat) == (2e-6, 256, "full")
    assert dpo.offload_reference_model
    assert not any("reward model" in note for note in notes), "none is read"


def test_offload_belongs_to_the_running_stage() -> None:
    assert parse(["--offload-reference-model"]).ppo.offload_reference_model
    assert parse(["--offload-reward-model"]).ppo.offload_reward_model
    assert parse(["--step=dpo", "--offload-reference-model"]).dpo.offload_reference_model


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--dpo.beta=0", "dpo: beta must be above 0, got 0.0"),
        ("--dpo.label-smoothing=0.5", r"label_smoothing must lie in \[0, 0.5\), got 0.5"),
        ("--dpo.frozen-dtype=float16", r"must be bfloat16\|float32 \| None"),
        (
            "--ppo.offload-reward-model --ppo.reward-model-weight=0",
            "offload_reward_model: with reward_model_weight=0 no reward model is loaded",
        ),
    ],
)
def test_values_out_of_range(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(flag.split())
