"""DeepSpeed-Chat's command lines mean here what they mean there."""

from pathlib import Path

import pytest

from rlhf_jax.cli import parse
from rlhf_jax.cli.deepspeed_names import NOT_NEEDED, REFUSED, RENAMED
from rlhf_jax.cli.fields import config_fields
from rlhf_jax.cli.parse import resolve
from rlhf_jax.stages.config import TrainConfig

DOCS = Path(__file__).parents[2] / "docs" / "flags.md"


def test_e2e_command() -> None:
    """`e2e_rlhf.py --actor-model 13b --reward-model 350m --deployment-type single_node`."""
    flags = "--actor-model 13b --reward-model 350m --deployment-type single_node --step 1 2 3"
    config = parse(flags.split())
    assert (config.actor_model, config.reward_model) == ("facebook/opt-13b", "facebook/opt-350m")
    assert config.step == (1, 2, 3)
    assert config.mesh is None


@pytest.mark.parametrize("name", ["facebook/opt-1.3b", "runs/x/actor", "meta-llama/Llama-2-7b-hf"])
def test_a_model_named_in_full_is_kept(name: str) -> None:
    assert parse(["--actor-model", name, "--reward-model", name]).actor_model == name


def test_a_size_that_is_not_opts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no OPT of size 7b.*1\.3b"):
        parse(["--actor-model=7b"])


def test_naming_only_the_actor_says_which_reward_model_is_taken() -> None:
    config, notes = resolve(["--actor-model=1.3b"])
    assert any(config.reward_model in note for note in notes)


@pytest.mark.parametrize(
    ("flags", "field", "rows"),
    [
        ("--step 1 --per_device_train_batch_size 8", "sft", 64),
        ("--step 1 --per_device_train_batch_size 8 --gradient_accumulation_steps 2", "sft", 128),
        ("--step 2 --per-device-train-batch-size 4", "reward", 32),
        ("--step 3 --per_device_generation_batch_size 4", "ppo", 32),
        ("--step 3 --per_device_train_batch_size 4", "ppo", 32),
    ],
)
def test_rows_per_device_are_multiplied_by_the_mesh(flags: str, field: str, rows: int) -> None:
    """DeepSpeed's train_batch_size = micro batch x accumulation steps x devices."""
    for mesh in ("8x1", "4x2", "2x2x2"):
        config, notes = resolve([*flags.split(), f"--mesh={mesh}"])
        stage = {"sft": config.sft, "reward": config.reward, "ppo": config.ppo}[field]
        assert stage.batch_size == rows
        assert any(f"batch-size={rows}" in note for note in notes)


def test_rows_per_training_step_of_ppo() -> None:
    flags = "--mesh=4x1 --per_device_generation_batch_size 8 --per_device_training_batch_size 4"
    config = parse(flags.split())
    assert (config.ppo.batch_size, config.ppo.minibatch_size) == (32, 16)


def test_the_names_of_older_scripts() -> None:
    flags = "--step 3 --mesh=4x1 --per_device_train_batch_size 8 --generation_batch_numbers 2"
    config, notes = resolve(
        [*flags.split(), "--per_device_mini_train_batch_size=4", "--disable_actor_dropout"]
    )
    assert (config.ppo.batch_size, config.ppo.minibatch_size) == (32, 16)
    assert config.ppo.generation_batches == 2
    assert "--disable_actor_dropout is not needed: dropout is never applied" in notes[0]
    with pytest.raises(ValueError, match="both set --ppo.batch-size"):
        resolve([*flags.split(), "--per_device_generation_batch_size=8"])


def test_rows_per_device_need_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"--mesh=8x1, or give --sft\.batch-size"):
        parse(["--step=1", "--per-device-train-batch-size=8"])
    one = parse(["--step=1", "--per-device-train-batch-size=8", "--deployment-type", "single_gpu"])
    assert (one.sft.batch_size, one.mesh) == (8, "1x1")


def test_single_gpu_contradicts_a_larger_mesh() -> None:
    with pytest.raises(ValueError, match="contradicts --mesh=8x1"):
        parse(["--deployment-type=single_gpu", "--mesh=8x1"])
    with pytest.raises(ValueError, match="single_gpu, single_node, multi_node"):
        parse(["--deployment-type=cloud"])


def test_dtype_by_deepspeeds_names() -> None:
    assert parse(["--dtype=bf16"]).dtype == "bfloat16"
    with pytest.raises(ValueError, match="float16 is not offered"):
        parse(["--dtype=fp16"])


def changed(*argv: str) -> dict[str, object]:
    """The fields in which a command line differs from the bare one."""
    base, got = (config_fields(parse(args)) for args in ((), argv))
    return {path: got[path].value for path in got if got[path].value != base[path].value}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--step 1 --lora_dim 128", {"sft.lora.dim": 128, "sft.lora.alpha": 1.0}),
        ("--step 2 --lora_dim 8", {"reward.lora.dim": 8, "reward.lora.alpha": 1.0}),
        (
            "--step 1 --lora_dim 8 --sft.lora.alpha 32",
            {"sft.lora.dim": 8, "sft.lora.alpha": 32.0},
        ),
        ("--actor_lora_dim 8", {"ppo.actor_lora.dim": 8, "ppo.actor_lora.alpha": 1.0}),
        ("--critic_lora_dim 0", {}),
        ("--step 1 --lora_module_name decoder.layers.", {"sft.lora.modules": ("decoder.layers.",)}),
        ("--actor_lora_module_name layers.", {"ppo.actor_lora.modules": ("layers.",)}),
        ("--critic_lora_learning_rate 0.5", {"ppo.critic_lora.learning_rate": 0.5}),
        ("--step 1 --only_optimize_lora", {"sft.lora.only": True}),
        (
            "--step 3 --only_optimize_lora",
            {"ppo.actor_lora.only": True, "ppo.critic_lora.only": True},
        ),
        ("--enable_ema", {"ppo.ema.enable": True}),
        (
            "--unsupervised_dataset_name a/b:c --unsup_coef 27.8",
            {"ppo.ptx_path": "a/b:c", "ppo.ptx_coef": 27.8},
        ),
        ("--enable_tensorboard", {"report_to": ("tensorboard",)}),
        (
            "--enable_tensorboard --tensorboard_path x",
            {"report_to": ("tensorboard",), "tensorboard_path": "x"},
        ),
        ("--enable_test_mode --test_stop_step 5", {"ppo.max_steps": 5}),
        (
            "--step dpo --beta 0.5 --label_smoothing 0.1",
            {"dpo.beta": 0.5, "dpo.label_smoothing": 0.1},
        ),
        ("--sft_only_data_path a b", {"data.sft_only_data_path": ("a", "b")}),
        ("--add_eot_token", {}),
    ],
)
def test_name_sets_its_fields(argv: str, expected: dict[str, object]) -> None:
    got = changed(*argv.split())
    got.pop("step", None)
    assert got == expected


@pytest.mark.parametrize("name", RENAMED)
def test_every_target_is_a_field(name: str) -> None:
    fields = config_fields(TrainConfig())
    assert {RENAMED[name].path, *RENAMED[name].also} <= set(fields)


def test_a_name_that_sets_two_fields_repeats_either() -> None:
    with pytest.raises(ValueError, match=r"both set --ppo\.critic-lora\.only"):
        parse(["--step=3", "--only-optimize-lora", "--ppo.critic-lora.only"])


def test_every_name_is_documented() -> None:
    text = DOCS.read_text()
    names = [full.rpartition(".")[2] for full in RENAMED] + [*NOT_NEEDED, *REFUSED]
    missing = [name for name in names if f"`--{name.replace('_', '-')}`" not in text]
    assert missing == []
