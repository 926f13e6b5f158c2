"""Keys, intervals and what a resumed run may change."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import yaml

from meshes.layout import parse_mesh
from rlhf_jax.cli import to_yaml
from rlhf_jax.stages.config import STAGES, TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.run import (
    Run,
    begun_stages,
    check_same_settings,
    flatten,
    prepared_directory,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(TrainConfig(output_dir=str(tmp_path)), parse_mesh("1x1"), 1)


def prepare(cfg: TrainConfig) -> None:
    """As a run does that ends at once."""
    with prepared_directory(cfg, to_yaml(cfg)):
        pass


def saved(cfg: TrainConfig) -> dict[str, object]:
    return yaml.safe_load(to_yaml(cfg))


def test_keys_differ_by_step_purpose_and_seed_alone(run: Run) -> None:
    def bits(run: Run, step: int, purpose: str) -> tuple[int, ...]:
        return tuple(jax.random.key_data(run.key(step, purpose)).tolist())

    other = Run(replace(run.cfg, seed=7), parse_mesh("4x2"), 2)
    elsewhere = Run(run.cfg, parse_mesh("4x2"), 2)
    keys = [bits(run, step, purpose) for step in (0, 1) for purpose in ("generate/0", "init")]
    assert len({*keys, bits(other, 0, "init")}) == 5
    assert bits(elsewhere, 1, "generate/0") == bits(run, 1, "generate/0")


def test_what_is_due(run: Run) -> None:
    assert [step for step in range(1, 11) if run.due(4, step, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if run.due(0, step, 10)] == [10]


def test_a_stage_is_done_once_its_results_are_recorded(run: Run) -> None:
    assert not run.is_done("sft")
    run.finish_stage("sft", {"loss": 1.0})
    run.finish_stage("reward", {})
    assert run.is_done("sft")
    assert run.is_done("reward")
    assert not run.is_done("ppo")


def test_the_summary_stays_json_where_a_result_is_not_finite(run: Run) -> None:
    run.finish_stage("ppo", {"before": {"kl": float("nan"), "score": 1.0}})
    text = (run.directory / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "ppo": {"before": {"kl": None, "score": 1.0}}
    }


def test_overwriting_never_deletes_what_the_run_reads(tmp_path: Path) -> None:
    model = tmp_path / "run" / "sft"
    model.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    cfg = TrainConfig(
        output_dir=str(tmp_path / "run"), actor_model=str(model), overwrite_output_dir=True
    )
    with pytest.raises(ValueError, match="would delete .*sft, which this run reads"):
        prepare(cfg)
    assert model.is_dir()
    reward = tmp_path / "run" / "mine.py"
    reward.touch()
    ppo = replace(cfg.ppo, reward_fn=(f"{reward}:score",))
    with pytest.raises(ValueError, match=r"would delete \S*mine.py, which this run reads"):
        prepare(replace(cfg, actor_model="quickstart", ppo=ppo))
    assert reward.is_file()


def test_settings_that_only_say_where_and_how_may_change_on_a_resume(tmp_path: Path) -> None:
    cfg = TrainConfig(mesh="4x2")
    moved = replace(cfg, mesh="1x2", output_dir="x", resume=True, save_interval=3, step=(3,))
    check_same_settings(moved, saved(cfg), STAGES.values())


def test_every_setting_that_changes_what_is_computed_is_named() -> None:
    cfg = TrainConfig(output_dir="runs/my run", ppo=PPOConfig(actor_learning_rate=1e-6))
    changed = replace(cfg, dtype="float32", ppo=replace(cfg.ppo, target_kl=0.5, top_k=5))
    with pytest.raises(ValueError, match="started with other settings") as error:
        check_same_settings(changed, saved(cfg), STAGES.values())
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert lines[1:4] == [
        "--dtype: bfloat16 then, float32 now",
        "--ppo.top-k: 0 then, 5 now",
        "--ppo.target-kl: None then, 0.5 now",
    ]
    assert len(lines) == 5
    assert lines[4].startswith("use the same ones (--resume --config='runs/my run/config.yaml')")


def test_settings_of_a_stage_that_has_not_begun_may_change(tmp_path: Path) -> None:
    """Step 1 is done and step 2 has a checkpoint; of step 3 there is none that is whole."""
    (tmp_path / "summary.json").write_text('{"sft": {}}')
    (tmp_path / "checkpoints" / "reward" / "10").mkdir(parents=True)
    (tmp_path / "checkpoints" / "ppo" / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    begun = begun_stages(tmp_path)
    assert begun == {"sft", "reward"}
    cfg = TrainConfig()
    check_same_settings(replace(cfg, ppo=replace(cfg.ppo, kl_coef=0.2)), saved(cfg), begun)
    changed = replace(cfg, reward=replace(cfg.reward, max_steps=7))
    with pytest.raises(ValueError, match="--reward.max-steps: None then, 7 now"):
        check_same_settings(changed, saved(cfg), begun)


def test_flattened_names_are_the_flags() -> None:
    names = flatten(TrainConfig())
    assert names["ppo.kl_coef"] == TrainConfig().ppo.kl_coef
    assert names["step"] == [1, 2, 3]
    assert not any(name == "ppo" for name in names)


def test_a_resumed_config_is_saved_as_one_that_starts(tmp_path: Path) -> None:
    """Also with --overwrite-output-dir, which would delete a run that another one reproduces."""
    cfg = TrainConfig(output_dir=str(tmp_path / "run"))
    file = tmp_path / "run" / "config.yaml"
    for flags in ({}, {"overwrite_output_dir": True}, {"resume": True}):
        again = replace(cfg, **flags)
        prepare(again)
        assert file.read_text() == to_yaml(cfg)


def test_overwriting_deletes_what_the_earlier_run_left(tmp_path: Path) -> None:
    cfg = TrainConfig(output_dir=str(tmp_path))
    prepare(cfg)
    (tmp_path / "metrics.jsonl").write_text("old")
    with pytest.raises(ValueError, match="holds another run"):
        prepare(cfg)
    assert (tmp_path / "metrics.jsonl").exists()
    again = replace(cfg, overwrite_output_dir=True)
    prepare(again)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_nothing_starts_in_the_directory_of_a_run_that_writes(tmp_path: Path) -> None:
    cfg = TrainConfig(output_dir=str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    ways = [
        replace(cfg, **flags) for flags in ({}, {"resume": True}, {"overwrite_output_dir": True})
    ]
    with prepared_directory(cfg, to_yaml(cfg)):
        metrics.write_text("live")
        for other in ways:
            with pytest.raises(ValueError, match=f"a run is writing .*process {os.getpid()} on"):
                prepare(other)
        assert metrics.read_text() == "live"
    with pytest.raises(ValueError, match="holds another run"):
        prepare(cfg)
    for other in ways[1:]:
        prepare(other)


def test_overwriting_keeps_others_out_too(tmp_path: Path) -> None:
    """The lock is not deleted with the rest."""
    cfg = TrainConfig(output_dir=str(tmp_path / "run"), overwrite_output_dir=True)
    prepare(cfg)
    (tmp_path / "run" / "sft").mkdir()
    with prepared_directory(cfg, to_yaml(cfg)):
        assert not (tmp_path / "run" / "sft").exists()
        with pytest.raises(ValueError, match="a run is writing"):
            prepare(cfg)


def test_a_lock_alone_makes_no_run_and_foreign_files_get_none(tmp_path: Path) -> None:
    cfg = TrainConfig(output_dir=str(tmp_path / "run"))
    prepare(cfg)
    (tmp_path / "run" / "config.yaml").unlink()
    prepare(cfg)
    foreign = TrainConfig(output_dir=str(tmp_path), overwrite_output_dir=True)
    with pytest.raises(ValueError, match="holds files of something else"):
        prepare(foreign)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_output_directory_that_cannot_be_is_told_with_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "README.md"
    file.write_text("text")
    for resume in (False, True):
        with pytest.raises(ValueError, match=f"^--output-dir={file}: is a file; name a directory$"):
            prepare(TrainConfig(output_dir=str(file), resume=resume))
    with pytest.raises(OSError, match=rf"^--output-dir={file}/x cannot be used: Not a dir"):
        prepare(TrainConfig(output_dir=str(file / "x")))

    def read_only(self: Path, **flags: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    message = "cannot be used: Read-only file system; choose another --output-dir$"
    with pytest.raises(OSError, match=message):
        prepare(TrainConfig(output_dir=str(tmp_path / "run")))
