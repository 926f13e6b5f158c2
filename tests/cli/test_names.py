"""Names on the command line: each one sets exactly one field, or says why it cannot."""

import re
from pathlib import Path

import pytest

from rlhf_jax.cli import parse
from rlhf_jax.cli.fields import config_fields, flag_of
from rlhf_jax.cli.parse import resolve
from rlhf_jax.cli.peer_names import NO_COUNTERPART, PEER_NAMES
from rlhf_jax.stages.config import TrainConfig

DOCS = Path(__file__).parents[2] / "docs" / "flags.md"


def values(config: TrainConfig) -> dict[str, object]:
    return {path: field.value for path, field in config_fields(config).items()}


def changed(*argv: str) -> dict[str, object]:
    """The fields that a command line sets to something else than the quickstart's value."""
    base, got = values(parse([])), values(parse(argv))
    return {path: value for path, value in got.items() if value != base[path]}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--sft.learning-rate=0.25", {"sft.learning_rate": 0.25}),
        ("--sft.learning_rate 0.25", {"sft.learning_rate": 0.25}),
        ("--step 1 --learning-rate 0.25", {"step": (1,), "sft.learning_rate": 0.25}),
        ("--step=2 --learning_rate 0.25", {"step": (2,), "reward.learning_rate": 0.25}),
        ("--step 3 --learning-rate 0.25", {"step": (3,), "ppo.actor_learning_rate": 0.25}),
        ("--ppo.learning-rate=1e-6", {"ppo.actor_learning_rate": 1e-6}),
        ("--kl-coef 0.5", {"ppo.kl_coef": 0.5}),
        ("--step 1 3 --max-seq-len 32", {"step": (1, 3), "sft.max_seq_len": 32}),
        ("--data-path a b", {"data.data_path": ("a", "b")}),
        ("--data-split 1,1,8", {"data.data_split": "1,1,8"}),
        ("--ppo.no-train-eos", {"ppo.train_eos": False}),
        ("--no-train-eos", {"ppo.train_eos": False}),
        ("--train-eos=false", {"ppo.train_eos": False}),
        ("--resume", {"resume": True}),
        ("--ppo.score-clip none", {"ppo.score_clip": None}),
        ("--eval-iters 3", {"eval_batches": 3}),
        ("--step 1 --gradient-checkpointing", {"step": (1,), "sft.remat": "full"}),
        (
            "--actor-gradient-checkpointing --critic_gradient_checkpointing",
            {"ppo.remat": "full"},
        ),
        ("--seed 4294967295", {"seed": 2**32 - 1}),
        ("--sft.lora.dim=8", {"sft.lora.dim": 8}),
        ("--step 1 --lora.dim 8", {"step": (1,), "sft.lora.dim": 8}),
        ("--sft.lora.modules q_proj layers.0.", {"sft.lora.modules": ("q_proj", "layers.0.")}),
        ("--ppo.ema.enable --ema.decay 0.5", {"ppo.ema.enable": True, "ppo.ema.decay": 0.5}),
        ("--actor_lora.only", {"ppo.actor_lora.only": True}),
        ("--report-to tensorboard wandb", {"report_to": ("tensorboard", "wandb")}),
        ("--report-to none", {}),
    ],
)
def test_name_sets_its_field_and_no_other(argv: str, expected: dict[str, object]) -> None:
    assert changed(*argv.split()) == expected


@pytest.mark.parametrize("path", list(config_fields(TrainConfig())))
def test_every_field_is_a_flag_in_both_spellings(path: str) -> None:
    """`--a.b-c` and `--a.b_c` are one flag: given together they are a repeat of that field."""
    value = "1" if path == "step" else "true"
    with pytest.raises(ValueError, match=r"given twice|both set"):
        parse([flag_of(path), value, f"--{path}", value])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--learning-rate 1", "--sft.learning-rate, --reward.learning-rate, --ppo.learning-rate"),
        ("--step 1 2 --weight-decay 1", "--sft.weight-decay, --reward.weight-decay"),
        ("--step 3 --weight-decay 1", "--ppo.actor-weight-decay, --ppo.critic-weight-decay"),
        ("--seed 1 --seed 1", "--seed is given twice"),
        ("--step 3 --step 1", "--step is given twice"),
        ("--output-dir a --output_dir b", "--output-dir and --output_dir both set"),
        ("--step 1 --max-steps 1 --sft.max-steps 1", "--max-steps and --sft.max-steps both set"),
        ("--config /none --config /none", "no such file"),
        ("--lerning-rate 1", "did you mean --learning-rate?"),
        ("--ppo.kl-coeff 1", "did you mean --ppo.kl-coef?"),
        ("--zzz", "unknown flag --zzz: --help"),
        ("-x", "two dashes"),
        ("stray", "in front of all flags"),
        ("--seed", "--seed takes one value, got none"),
        ("--seed 1 2", "--seed takes one value, got 2"),
        ("--seed x", "--seed must be int, got 'x'"),
        ("--seed=-1", "--seed must be from 0 to 4294967295 (2^32 - 1), got -1"),
        ("--seed -1", "got -1"),
        ("--seed 4294967296", "got 4294967296"),
        ("--recipe foo", "unknown recipe 'foo': there are quickstart, opt"),
        ("--ppo.target-kl x", "--ppo.target-kl must be float | None, got 'x'"),
        ("--dtype float8", "--dtype must be bfloat16|float32, got 'float8'"),
        ("--resume maybe", "--resume is a switch"),
        ("--no-seed", "only a switch can be negated"),
        ("--step 4", "--step takes any of 1 2 3, or dpo, got 4"),
        ("--sft.batch-size 0", "sft: batch_size must be at least 1, got 0"),
        ("--ppo.gamma 2", "ppo: gamma=2.0"),
        ("--resume --overwrite-output-dir", "contradict"),
        ("--sft.lora.dim -1", "sft.lora: dim must be 0"),
        ("--lora.dim 8", "--sft.lora.dim, --reward.lora.dim"),
        ("--ppo.actor-lora.rank 8", "did you mean --ppo.actor-lora."),
        ("--report-to mlflow", "--report-to must be tensorboard|wandb|trackio ..., got 'mlflow'"),
        ("--run-name x", "--report-to wandb or trackio"),
        ("--tensorboard-path x --report-to wandb", "needs --report-to tensorboard"),
        ("--reward-fn", "--reward-fn takes one value or more, got none (`none` empties it)"),
        ("--reward-fn --seed 1", "--reward-fn takes one value or more"),
        ("--data-path none", "data_path is empty"),
        ("--lr 1", "did you mean --learning-rate?"),
        ("--save_steps 5", "did you mean --save-interval?"),
        ("--checkpoint-interval 5", "did you mean --save-interval?"),
        ("--loss_type ipo", "unknown flag --loss_type: step dpo has the sigmoid loss"),
        ("--ppo.stop-token eos", "answers end in the EOS that the model's tokenizer names"),
        ("--lora_r 4", "did you mean --lora.dim?"),
        ("--use-peft", "did you mean --lora.dim?"),
        ("--sft.lora.rank 4", "did you mean --sft.lora.dim?"),
        ("--ppo.ema true", "--ppo.ema: it is a group of settings, such as --ppo.ema.enable"),
        ("--ppo.reward-model-weight 0 --reward-fn a:b", "leave it out with --step 1 3"),
    ],
)
def test_mistake_is_named(argv: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        parse(argv.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offloading_belongs_to_the_running_stage() -> None:
    assert changed("--step=3", "--offload") == {"step": (3,), "ppo.offload": True}
    assert changed("--step=1", "--offload", "--optim=lion")["sft.optim"] == "lion"
    with pytest.raises(ValueError, match=r"--offload could mean each of --sft.offload, "):
        parse(["--offload"])


def test_mixed_precision_lora_is_an_actor_in_int8() -> None:
    given = "--enable-mixed-precision-lora", "--actor-lora-dim=8"
    assert changed(*given)["ppo.actor_lora.load_in_8bit"] is True
    with pytest.raises(ValueError, match="load_in_8bit: what trains cannot be in int8"):
        parse(["--enable-mixed-precision-lora"])


def test_what_is_refused_may_be_off() -> None:
    """Nothing that would change the result is taken in silence; what is off anyway may be said."""
    assert changed("--dropout=0") == {}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--dropout 0.1", "dropout is never applied"),
        ("--actor-dropout=0.1", "dropout is never applied"),
        ("--deepspeed_config ds.json", "every setting has its own flag"),
        ("--eot_token <eot>", "EOS that the model's tokenizer names"),
        ("--unsupervised-dataset-config-name x", "owner/name:config"),
    ],
)
def test_what_is_not_offered_is_refused_with_its_reason(argv: str, reason: str) -> None:
    with pytest.raises(ValueError, match="is not offered") as caught:
        parse(argv.split())
    assert reason in str(caught.value)
    assert changed("--dropout", "0", "--critic_dropout", "0.0") == {}


def test_what_is_not_needed_is_accepted_with_a_note() -> None:
    flags = ["--enable-hybrid-engine", "--deepspeed", "--local_rank=0", "--actor-zero-stage", "3"]
    config, notes = resolve(flags)
    assert config == parse([])
    assert len(notes) == 4
    assert "fully sharded" in notes[-1]


@pytest.mark.parametrize("name", sorted(NO_COUNTERPART))
def test_a_name_for_what_is_no_setting_says_what_holds(name: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown flag --{name}: {NO_COUNTERPART[name]}$"):
        parse([f"--{name}", "1"])


def test_the_table_of_trls_names_is_what_the_command_line_answers() -> None:
    section = DOCS.read_text().partition("## Coming from TRL\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`--.*`) \| `--(\S+)`", section, re.MULTILINE)
    assert len(rows) > 10
    for theirs, ours in rows:
        for name in re.findall(r"`--(\w+)`", theirs):
            assert flag_of(PEER_NAMES[name]) == f"--{ours}", name


@pytest.mark.parametrize("name", sorted(PEER_NAMES))
def test_another_librarys_name_is_unknown_here_and_leads_to_one_that_is_known(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown flag --{name}: did you mean --") as caught:
        parse([f"--{name}", "1"])
    meant = str(caught.value).rpartition("did you mean --")[2].removesuffix("?").replace("-", "_")
    assert any(path == meant or path.endswith(f".{meant}") for path in config_fields(TrainConfig()))


@pytest.mark.parametrize(
    ("argv", "notes"),
    [
        ("--sft.lora.only", ["--sft.lora.only sets nothing: --sft.lora.dim is 0"]),
        ("--ema.decay 0.9", ["--ema.decay sets nothing: --ppo.ema.enable is false"]),
        ("--ppo.merge-lora", ["--ppo.merge-lora sets nothing: --ppo.actor-lora.dim is 0"]),
        (
            "--adaptive-kl-horizon 5",
            ["--adaptive-kl-horizon sets nothing: --ppo.adaptive-kl-target is none"],
        ),
        (
            "--sft.lr-power 2",
            ["--sft.lr-power sets nothing: --sft.lr-scheduler-type is not polynomial"],
        ),
        ("--dpo.beta 0.2", ["--dpo.beta sets nothing: steps 1, 2 and 3 run"]),
        (
            "--step 1 --ppo.max-steps 9",
            ["--ppo.max-steps sets nothing: only step 1 runs"],
        ),
        (
            "--step 2 --recipe quickstart --reward-model x",
            ["--reward-model sets nothing: --reward.train-from is actor"],
        ),
        ("--step 1 --reward-model 350m", ["--reward-model sets nothing: only step 1 runs"]),
        (
            "--step 3 --reward-fn a:b --ppo.reward-model-weight 0 --reward-model 350m",
            ["--reward-model sets nothing: --ppo.reward-model-weight is 0.0"],
        ),
        (
            "--step 3 --reward-fn a:b --ppo.reward-model-weight 0 --critic-from reward_model "
            "--standardize-score",
            [
                "--critic-from sets nothing: --ppo.reward-model-weight is 0.0",
                "--standardize-score sets nothing: --ppo.reward-model-weight is 0.0",
            ],
        ),
        (
            "--step 3 --reward-fn a:b --ppo.reward-model-weight 0 --critic-from actor "
            "--no-standardize-score",
            [],
        ),
        ("--step 3 --critic-from reward_model --standardize-score", []),
        ("--sft.lora.only --sft.lora.dim 4", []),
        ("--no-merge-lora", []),
        ("--ema.decay 0.9 --enable-ema", []),
        ("--recipe llama-2-7b-lora --sft.lora.only", []),
        ("--step 1 dpo --beta 0.2", []),
        ("--recipe smollm2-gsm8k --actor-model a", []),
        ("--step 3 --actor-model a --ppo.reward-model-weight 0 --reward-fn a:b", []),
        (
            "--recipe smollm2-gsm8k --reward-model a --reward.max-steps 9",
            [
                "--reward-model sets nothing: --ppo.reward-model-weight is 0.0",
                "--reward.max-steps sets nothing: steps 1 and 3 run",
            ],
        ),
    ],
)
def test_a_flag_that_sets_nothing_is_said(argv: str, notes: list[str]) -> None:
    assert resolve(argv.split())[1] == notes


@pytest.mark.parametrize(
    ("argv", "weight"),
    [
        ("--step 1 3 --reward-fn a:b", 0.0),
        ("--step 3 --reward-fn a:b --actor-model 1.3b", 0.0),
        ("--step 1 2 3 --reward-fn a:b", 1.0),
        ("--step 3 --reward-fn a:b --reward-model 350m", 1.0),
        ("--step 3 --reward-fn a:b --critic-model-name-or-path 350m", 1.0),
        ("--step 3 --reward-fn a:b --ppo.reward-model-weight 2", 2.0),
        ("--step 3 --reward-fn none", 1.0),
        ("--step 1 --reward-fn a:b", 1.0),
    ],
)
def test_functions_score_alone_where_no_reward_model_is_trained_or_named(
    argv: str, weight: float
) -> None:
    config, notes = resolve(argv.split())
    assert config.ppo.reward_model_weight == weight
    assert any("functions score alone" in note for note in notes) == (weight == 0)
    if weight == 0:
        assert not any("the reward model is" in note for note in notes)


def test_a_resumed_run_keeps_the_reward_model_that_it_trained(tmp_path: Path) -> None:
    argv = ["--step", "3", "--reward-fn", "a:b", "--output-dir", str(tmp_path), "--resume"]
    assert parse(argv).ppo.reward_model_weight == 0
    (tmp_path / "reward").mkdir()
    assert parse(argv).ppo.reward_model_weight == 1
