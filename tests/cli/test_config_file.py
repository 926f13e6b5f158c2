"""YAML: what is written reads back equal, what is wrong is named with file and key."""

from pathlib import Path

import pytest

from rlhf_jax.cli import parse, to_yaml
from rlhf_jax.cli.parse import resolve
from rlhf_jax.recipes.catalog import RECIPES


@pytest.fixture
def run_yaml(tmp_path: Path):
    """`run_yaml(text)`: the arguments that read this text as run.yaml."""

    def write(text: str) -> list[str]:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return ["--config", str(file)]

    return write


@pytest.mark.parametrize("recipe", ["quickstart", "deepspeed-chat", "llama-2-7b-lora"])
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--step", "1", "3", "--mesh=4x2", "--ppo.score-clip=none", "--no-train-eos", "--resume"],
        ["--ppo.actor-lora.modules", "q", "--ema.enable", "--report-to", "wandb", "--run-name=x"],
        ["--data-path", "a: b", "#c", "--sft-only-data-path", "1", "--ppo.target-kl=1e-7"],
    ],
)
def test_round_trip(recipe: str, flags: list[str], run_yaml) -> None:
    config = parse([f"--recipe={recipe}", *flags])
    for base in ("quickstart", "opt-13b-single-node", "opt-66b-multi-node"):
        assert parse([*run_yaml(to_yaml(config)), f"--recipe={base}"]) == config
    assert parse(run_yaml(to_yaml(config))) == config


def test_a_number_without_a_dot_is_a_number(run_yaml) -> None:
    """PyYAML reads `1e-6` as a string; the parser of the flags reads it all the same."""
    assert parse(run_yaml("ppo:\n  actor_learning_rate: 1e-6\n")).ppo.actor_learning_rate == 1e-6


@pytest.mark.parametrize(
    "name", ["20240101_120000", "007", "0x10", "12:30", "1.10", "2024-01-01T09:00:00Z"]
)
def test_what_looks_like_a_number_stays_a_name(name: str, run_yaml) -> None:
    config = parse(run_yaml(f"output_dir: {name}\ndata: {{data_path: [{name}], max_rows: 1_000}}"))
    assert (config.output_dir, config.data.data_path) == (name, (name,))
    assert config.data.max_rows == 1000


def test_flags_override_the_file_and_the_file_the_recipe(run_yaml) -> None:
    args = run_yaml("recipe: opt\nseed: 1\nsft: {learning-rate: 0.5, batch_size: 32}\n")
    config = parse([*args, "--sft.learning-rate=0.25"])
    assert (config.seed, config.sft.learning_rate, config.sft.batch_size) == (1, 0.25, 32)
    assert config.reward == RECIPES["opt"]().reward


def test_short_and_foreign_names_work_in_a_file(run_yaml) -> None:
    args = run_yaml("actor_model: 1.3b\nmesh: 8x1\nstep: 1\nper_device_train_batch_size: 4\n")
    config = parse(args)
    assert (config.actor_model, config.sft.batch_size) == ("facebook/opt-1.3b", 32)
    assert parse([*args, "--sft.batch-size=8"]).sft.batch_size == 8


def test_nested_keys_reach_every_depth(run_yaml) -> None:
    text = "ppo:\n  actor-lora: {dim: 8, modules: [q_proj]}\n  ema.decay: 0.5\n"
    config = parse(run_yaml(text))
    assert (config.ppo.actor_lora.dim, config.ppo.actor_lora.modules) == (8, ("q_proj",))
    assert config.ppo.ema.decay == 0.5


def test_an_empty_file_changes_nothing(run_yaml) -> None:
    assert parse(run_yaml("# nothing\n")) == parse([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sft: {lerning_rate: 1}", "run.yaml: unknown key sft.lerning_rate: did you mean sft."),
        ("sft: {batch_size: x}", "run.yaml: sft.batch_size must be int, got 'x'"),
        ("learning_rate: 1", "sft.learning_rate, reward.learning_rate, ppo.learning_rate"),
        ("seed: 1\nseed: 2", "'seed' stands twice"),
        ("step: 1\nmax_steps: 1\nsft: {max_steps: 2}", "both set --sft.max-steps"),
        ("config: other.yaml", "cannot name another one"),
        ("seed: [1", "not valid YAML"),
        ("- 1", "it holds a list"),
        ("data_path: [[1]]", "data_path must be a list of plain values"),
        ("seed: {a: 1}", "unknown key seed.a"),
        ("output_dir: {{ dir }}", "not valid YAML: a key that is no text"),
        ("output_dir:", "run.yaml: output_dir has no value"),
        ("actor_model: null", "run.yaml: actor_model has no value"),
        ("dropout: 0.1", "run.yaml: dropout is not offered"),
        ("sft: {lora: {rank: 8}}", "run.yaml: unknown key sft.lora.rank"),
    ],
)
def test_mistake_names_file_and_key(text: str, message: str, run_yaml) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (compared below)
        parse(run_yaml(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_feature_that_is_off_may_be_written(run_yaml) -> None:
    assert resolve(run_yaml("dropout: 0")) == (parse([]), [])
