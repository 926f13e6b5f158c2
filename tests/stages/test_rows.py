"""What a stage is given to train on and to be evaluated on, and what is said about it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_jax.data.batches import collate_text
from rlhf_jax.data.blend import DataConfig
from rlhf_jax.data.tokenize import tokenize_prompts, tokenize_sft
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.recipes.quickstart import quickstart
from rlhf_jax.stages.checks import TOKENIZE, check_data, check_models, check_positions
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.prompts import ppo_data
from rlhf_jax.stages.reward import reward_data
from rlhf_jax.stages.rows import (
    StageRows,
    batches_of_one_length,
    count_rows,
    read_rows,
    remarks,
)
from rlhf_jax.stages.sft import sft_data

SHORT = [{"prompt": f"p{n} ", "chosen": f"a{n}", "rejected": "no"} for n in range(10)]
LONG = [{"prompt": "p" * 50, "chosen": "a" * 50, "rejected": "no"}] * 4


class FakeRun:
    """All that batches ask of a run: its config and directory."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg, self.directory = cfg, Path(cfg.output_dir)
        self.directory.mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def model() -> Pretrained:
    return find_pretrained("quickstart")


def config(folder: Path, train: list[dict[str, str]], held_out: list[dict[str, str]]) -> Any:
    """The quickstart on a folder with these rows."""
    for name, rows in (("train", train), ("eval", held_out)):
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    data = DataConfig(data_path=(str(folder),), data_split="", eval_fraction=0.0)
    return replace(quickstart(), data=data, eval_batches=2, output_dir=str(folder / "run"))


@pytest.mark.parametrize("stage", TOKENIZE)
def test_train_and_held_out_rows_are_counted_each(
    tmp_path: Path, model: Pretrained, stage: StageName
) -> None:
    cfg = config(tmp_path, SHORT + LONG, SHORT[:2] + LONG)
    rows = read_rows(cfg, stage, model, TOKENIZE[stage])
    assert (len(rows.train), len(rows.held_out)) == (10, 2)
    limit = 40 if stage == "ppo" else 52
    flag = "--ppo.max-prompt-seq-len" if stage == "ppo" else f"--{stage}.max-seq-len"
    dropped, ways = f"4 dropped (over {limit} tokens)", f"{flag} or --data.overlong=cut"
    assert rows.notes[-2:] == (
        f"{stage}: 10 rows, {dropped}; to keep them: {ways}",
        f"{stage} held out: 2 rows, {dropped}",
    )
    cut = replace(cfg, data=replace(cfg.data, overlong="cut"))
    assert "to keep them" not in "".join(read_rows(cut, stage, model, TOKENIZE[stage]).notes[-1:])


def test_flags_that_keep_rows_are_named_where_held_out_ones_alone_are_too_long(
    tmp_path: Path, model: Pretrained
) -> None:
    notes = read_rows(config(tmp_path, SHORT, LONG), "sft", model, tokenize_sft).notes
    assert "to keep them" not in notes[-2]
    assert "; to keep them: --sft.max-seq-len or --data.overlong=cut; nothing is" in notes[-1]


def said(
    cfg: TrainConfig, model: Pretrained, stage: StageName, num_train: int, num_held_out: int = 0
) -> str:
    return "; ".join(remarks(cfg, stage, model, num_train, num_held_out))


def test_few_steps_and_a_batch_larger_than_the_rows_are_told(model: Pretrained) -> None:
    cfg = quickstart()
    plain = replace(cfg, reward=replace(cfg.reward, max_steps=None, num_warmup_steps=0))
    assert said(plain, model, "reward", 11) == (
        "reward: 11 rows in batches of 64 make 1 step: lower --reward.batch-size or raise "
        "--reward.num-train-epochs"
    )
    assert "make 9 steps" in said(plain, model, "reward", 9 * 64)
    assert said(plain, model, "reward", 9 * 64 + 1) == ""
    assert said(cfg, model, "sft", 63) == (
        "sft: a batch of 64 is larger than the 63 rows: lower --sft.batch-size"
    )
    assert said(cfg, model, "sft", 64) == ""


def test_scores_in_units_of_another_token_are_told(model: Pretrained) -> None:
    cfg = replace(quickstart(), step=(3,))

    def told(**changes: Any) -> str:
        return said(replace(cfg, ppo=replace(cfg.ppo, **changes)), model, "ppo", 640)

    assert "ppo: --ppo.no-train-eos reads scores before the token" in told(train_eos=False)
    assert told(train_eos=False, standardize_score=False) == ""
    assert told(train_eos=False, reward_model_weight=0.0, reward_fn=("a:b",)) == told() == ""


def test_a_warm_up_longer_than_the_stage_is_told(model: Pretrained) -> None:
    """Of PPO the updates count: 2 iterations of 4 minibatches, twice; or of 2, with few prompts."""
    cfg = quickstart()
    sft = replace(cfg.sft, num_warmup_steps=1000, max_steps=2)
    assert said(replace(cfg, sft=sft), model, "sft", 640) == (
        "sft: --sft.num-warmup-steps=1000 is no less than its 2 optimizer steps: the learning rate "
        "only rises, to 0.2% of what is set: lower it"
    )
    short = {"num_warmup_steps": 16, "minibatch_size": 16, "ppo_epochs": 2, "max_steps": 2}
    ppo = replace(cfg.ppo, **short)
    assert "its 16 optimizer steps" in said(replace(cfg, ppo=ppo), model, "ppo", 640)
    assert "its 8 optimizer steps" in said(replace(cfg, ppo=ppo), model, "ppo", 17)  # of 16 and 1
    more = replace(cfg.ppo, **short | {"num_warmup_steps": 15})
    assert said(replace(cfg, ppo=more), model, "ppo", 640, 0) == ""


def test_held_out_rows_that_are_not_evaluated_are_counted(model: Pretrained) -> None:
    cfg = replace(quickstart(), eval_batches=2)
    assert said(cfg, model, "dpo", 6400, 129) == (
        "dpo: 128 of 129 held-out rows are evaluated (--eval-batches)"
    )
    assert said(cfg, model, "dpo", 6400, 128) == ""
    limit = cfg.ppo.num_eval_prompts
    assert said(cfg, model, "ppo", 6400, limit + 1) == (
        f"ppo: {limit} of {limit + 1} held-out rows are evaluated (--ppo.num-eval-prompts)"
    )


def test_the_untrained_model_on_own_data_is_told_once(tmp_path: Path, model: Pretrained) -> None:
    cfg = config(tmp_path, SHORT, [])
    assert said(cfg, model, "sft", 6400) == (
        "sft trains quickstart, an untrained model of 52 tokens a row: give --actor-model for a "
        "real one"
    )
    assert said(cfg, replace(model, name="runs/mine/sft"), "reward", 6400) == ""
    alone = replace(cfg, reward=replace(cfg.reward, train_from="reward_model"))
    assert "give --reward-model for" in said(alone, model, "reward", 6400)


def test_what_stages_read_and_dropped_is_kept_for_the_report(
    tmp_path: Path, model: Pretrained
) -> None:
    run: Any = FakeRun(config(tmp_path, SHORT + LONG, SHORT[:3]))
    _, evaluation = sft_data(run, model)
    _, pairs = reward_data(run, model)
    assert (count_rows(evaluation), count_rows(pairs)) == (3, 3)
    kept = json.loads((run.directory / "rows.json").read_text())
    assert list(kept) == ["sft", "reward"]
    assert (kept["sft"]["rows"], kept["sft"]["dropped"]) == (10, {"over 52 tokens": 4})
    assert "sft: a batch of 64 is larger" in kept["sft"]["notes"][-1]


@pytest.mark.parametrize("data_of", [sft_data, reward_data])
def test_a_stage_whose_held_out_rows_are_all_dropped_has_no_evaluation(
    tmp_path: Path, model: Pretrained, capsys: pytest.CaptureFixture[str], data_of: Any
) -> None:
    loader, evaluation = data_of(FakeRun(config(tmp_path, SHORT, LONG)), model)
    assert (loader.num_rows, evaluation) == (10, [])
    assert "held out: 0 rows, 4 dropped (over 52 tokens); to keep" in capsys.readouterr().out


def test_ppo_whose_held_out_prompts_are_all_dropped_has_no_evaluation(
    tmp_path: Path, model: Pretrained, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = FakeRun(config(tmp_path, SHORT, LONG))
    data = ppo_data(run, model)
    assert (data.train.num_rows, data.evaluation, data.held_out) == (10, [], [])
    assert "ppo held out: 0 rows, 4 dropped (over 40 tokens)" in capsys.readouterr().out


def test_without_an_eval_split_nothing_is_said_of_one(tmp_path: Path, model: Pretrained) -> None:
    rows = read_rows(config(tmp_path, SHORT, []), "sft", model, tokenize_sft)
    assert rows.held_out == []
    assert "held out:" not in "".join(rows.notes)


def test_no_train_row_left_names_the_flag(tmp_path: Path, model: Pretrained) -> None:
    cfg = config(tmp_path, LONG, SHORT)
    with pytest.raises(ValueError, match=r"sft: of 4 train rows none is left.*: 0 rows, 4 dropped"):
        read_rows(cfg, "sft", model, tokenize_sft)
    ways = r"Raise --ppo\.max-prompt-seq-len=40, or use --data\.overlong=cut, or give other data"
    with pytest.raises(ValueError, match=ways):
        read_rows(cfg, "ppo", model, tokenize_prompts)


def test_where_no_train_row_is_left_the_advice_follows_the_reasons(
    tmp_path: Path, model: Pretrained
) -> None:
    def advice(rows: list[dict[str, str]], stage: StageName, overlong: str = "drop") -> str:
        cfg = config(tmp_path, rows, [])
        cfg = replace(cfg, data=replace(cfg.data, overlong=overlong))
        with pytest.raises(ValueError, match="none is left after tokenising") as error:
            read_rows(cfg, stage, model, TOKENIZE[stage])
        return str(error.value).split("). ")[-1]

    empty = [{"prompt": "", "chosen": "", "rejected": "b"}]
    equal = [{"prompt": "p", "chosen": "a", "rejected": "a"}]
    raise_it = "aise --reward.max-seq-len=52, or "
    assert advice(empty, "ppo") == "Fill in prompts that are empty, or give other data"
    assert advice(empty, "sft") == "Fill in answers that are empty, or give other data"
    assert advice(equal, "reward") == "Give other data"
    assert advice(equal, "reward", "cut") == f"R{raise_it}give other data"
    assert advice([*LONG, *empty], "reward") == (
        f"R{raise_it}use --data.overlong=cut, or fill in answers that are empty, or give other data"
    )


def test_an_empty_stage_is_found_before_the_first_one_runs(
    tmp_path: Path, model: Pretrained
) -> None:
    cfg = config(tmp_path, SHORT, [])
    check_data(cfg, model)
    with pytest.raises(ValueError, match="Raise --ppo.max-prompt-seq-len=3"):
        check_data(replace(cfg, ppo=replace(cfg.ppo, max_prompt_seq_len=3)), model)


def test_batches_have_one_length_which_never_exceeds_the_positions(
    tmp_path: Path, model: Pretrained
) -> None:
    """The longest row has 7 tokens: BOS, 3 of the prompt, 2 of the answer, EOS."""
    run: Any = FakeRun(config(tmp_path, SHORT, SHORT))
    rows: StageRows[Any] = read_rows(run.cfg, "sft", model, tokenize_sft)
    for room, length in ((64, 16), (10, 10)):
        loader, evaluation = batches_of_one_length(
            run, rows, collate_text, batch_size=4, max_length=room
        )
        shapes = {batch.tokens_BT.shape for batch in (loader.batch(0), *evaluation)}
        assert shapes == {(4, length)}
        assert len(evaluation) == 2  # of 3: `eval_batches`


def test_rows_longer_than_the_positions_are_refused(model: Pretrained) -> None:
    check_positions(model, ("--sft.max-seq-len", 64))
    message = "--sft.max-seq-len=65 makes 65 tokens, quickstart has 64 positions: lower it to 64"
    with pytest.raises(ValueError, match=message):
        check_positions(model, ("--sft.max-seq-len", 65))


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_only_the_lengths_of_stages_that_run_are_compared(
    model: Pretrained, stage: StageName
) -> None:
    cfg = quickstart()
    settings = replace(getattr(cfg, stage), max_seq_len=65)
    with pytest.raises(ValueError, match=rf"--{stage}\.max-seq-len=65 makes 65 tokens"):
        check_models(replace(cfg, **{stage: settings}), model)
    other = (2,) if stage == "sft" else (1,)
    check_models(replace(cfg, **{stage: settings}, step=other), model)


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_weighted_blend_keeps_its_proportions_in_every_epoch(
    tmp_path: Path, model: Pretrained, capsys: pytest.CaptureFixture[str], stage: StageName
) -> None:
    cfg = config(tmp_path, SHORT, [])
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "q ", "completion": "r"}) + "\n", encoding="utf-8")
    data = replace(cfg.data, data_path=(str(tmp_path), str(other)), data_weights=(1.0, 3.0))
    run: Any = FakeRun(replace(cfg, data=data, ppo=replace(cfg.ppo, batch_size=4)))
    loader = ppo_data(run, model).train if stage == "ppo" else sft_data(run, model)[0]
    assert f"{stage}: an epoch has 3 of {tmp_path}, 8 of {other}" in capsys.readouterr().out
    first: list[int] = []
    for step in range(4 * loader.num_batches):
        batch: Any = loader.batch(step)
        tokens = batch.tokens_BP if stage == "ppo" else batch.tokens_BT
        real = tokens[batch.valid_B > 0]
        first += real[:, 1].tolist()
    assert (first.count(ord("p")), first.count(ord("q"))) == (12, 32)


def test_more_prompts_than_there_are_numbers_for_are_refused(
    tmp_path: Path, model: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = FakeRun(config(tmp_path, SHORT, []))
    monkeypatch.setattr("rlhf_jax.stages.prompts.COPIES_APART", len(SHORT))
    ppo_data(run, model)
    monkeypatch.setattr("rlhf_jax.stages.prompts.COPIES_APART", len(SHORT) - 1)
    with pytest.raises(ValueError, match=f"the data have {len(SHORT)}: lower --data.max-rows"):
        ppo_data(run, model)


def test_every_prompt_has_the_columns_of_all_sources(tmp_path: Path, model: Pretrained) -> None:
    """A reward function is called with the same ones whatever rows are in a batch."""
    cfg = config(tmp_path, SHORT, SHORT[:2])
    other = tmp_path / "other.jsonl"
    marked = [{**row, "gold": "7"} for row in SHORT[:3]]
    other.write_text("".join(json.dumps(row) + "\n" for row in marked), encoding="utf-8")
    data = replace(cfg.data, data_path=(str(tmp_path), str(other)))
    run: Any = FakeRun(replace(cfg, data=data))
    found = ppo_data(run, model)
    rows = [*found.rows.values(), *found.held_out]
    assert all(row.columns.keys() == {"gold"} for row in rows)
    assert {row.columns["gold"] for row in found.rows.values()} == {None, "7"}


def test_a_weighted_source_whose_rows_are_all_too_long_is_named(
    tmp_path: Path, model: Pretrained
) -> None:
    cfg = config(tmp_path, SHORT, [])
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps(LONG[0]) + "\n", encoding="utf-8")
    data = replace(cfg.data, data_path=(str(tmp_path), str(long)), data_weights=(1.0, 1.0))
    with pytest.raises(
        ValueError, match=r"leaves no train row of .*long\.jsonl, which has a we"
    ) as error:
        read_rows(replace(cfg, data=data), "sft", model, tokenize_sft)
    assert "Raise --" in str(error.value)


def test_of_a_weighted_source_of_empty_answers_no_length_is_to_blame(
    tmp_path: Path, model: Pretrained
) -> None:
    cfg = config(tmp_path, SHORT, [])
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"prompt": "p", "completion": ""}) + "\n", encoding="utf-8")
    data = replace(cfg.data, data_path=(str(tmp_path), str(empty)), data_weights=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"empty\.jsonl, which .*\. Fill in answers") as error:
        read_rows(replace(cfg, data=data), "sft", model, tokenize_sft)
    assert "aise" not in str(error.value)


def test_a_source_without_pairs_stops_step_2(tmp_path: Path, model: Pretrained) -> None:
    cfg = config(tmp_path, [{"prompt": "p", "completion": "c"}] * 4, [])
    with pytest.raises(ValueError, match="prompt\\+completion, which stage reward cannot use"):
        read_rows(cfg, "reward", model, TOKENIZE["reward"])
