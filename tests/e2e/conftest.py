"""Small runs of all stages through the pipeline, and what they left."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_jax.cli import to_yaml
from rlhf_jax.cli.values import replace_fields
from rlhf_jax.recipes.catalog import make_recipe
from rlhf_jax.runtime.metrics import read_rows
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.pipeline import run_pipeline
from rlhf_jax.stages.run import Run

SMALL: dict[str, object] = {
    "log_interval": 1,
    "eval_batches": 1,
    "data.max_rows": 64,
    "sft.batch_size": 8,
    "sft.max_steps": 4,
    "sft.num_warmup_steps": 0,
    "reward.batch_size": 8,
    "reward.max_steps": 4,
    "reward.num_warmup_steps": 0,
    "ppo.batch_size": 8,
    "ppo.max_steps": 3,
    "ppo.num_eval_prompts": 8,
}
"""Changes to the recipe `quickstart`: a few steps of 8 rows, which divide over every mesh here."""

NUM_LAYERS = 2
"""That tests keep of a trained model."""

CLOCK = ("time", "timing_s/", "perf/")
"""Beginnings of metric names that no two runs share."""

type Metrics = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The directory of a run, and readers of what is in it."""

    directory: Path

    def metrics(self) -> Metrics:
        """The rows of metrics.jsonl by stage and step, each of which is there once."""
        rows = read_rows(self.directory / "metrics.jsonl")
        found = {(row["stage"], row["step"]): row for row in rows}
        assert len(found) == len(rows)
        return found

    def answers(self) -> dict[tuple[int, str], str]:
        """What the policy said, by step and prompt."""
        rows = read_jsonl(self.directory / "samples" / "ppo.jsonl")
        return {(row["step"], row["prompt"]): row["answer"] for row in rows}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


type Config = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def small() -> Config:
    """`small(directory, {"ppo.max_steps": 2})`: the quickstart, cut down to a few steps."""

    def make(directory: Path, changes: Mapping[str, object] | None = None) -> TrainConfig:
        values = SMALL | {"output_dir": str(directory)} | dict(changes or {})
        return replace_fields(make_recipe("quickstart"), values)

    return make


def train(cfg: TrainConfig) -> Outcome:
    run_pipeline(cfg, to_yaml(cfg))
    return Outcome(Path(cfg.output_dir))


@pytest.fixture(scope="session")
def run() -> Callable[[TrainConfig], Outcome]:
    """`run(config)`: all of it, in this process."""
    return train


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], Outcome]:
    """`outcome(directory)`: what a run left there."""
    return Outcome


@pytest.fixture(scope="session")
def unbroken(small: Config, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The small run on 4x2, which others are compared with."""
    return train(small(tmp_path_factory.mktemp("unbroken") / "run", {"mesh": "4x2"}))


@pytest.fixture(scope="session")
def stories(shared_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of a trained model: each one more is compiled into every program."""
    directory = tmp_path_factory.mktemp("stories") / "model"
    shutil.copytree(shared_data("stories260K-hf"), directory, copy_function=shutil.copyfile)
    directory.chmod(0o700)
    config = json.loads((directory / "config.json").read_text())
    dropped = range(NUM_LAYERS, config["num_hidden_layers"])
    config["num_hidden_layers"] = NUM_LAYERS
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    beginnings = tuple(f"model.layers.{n}." for n in dropped)
    kept = {name: x for name, x in weights.items() if not name.startswith(beginnings)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


EXTRAS: dict[str, object] = {
    "step": (3,),
    "mesh": "4x2",
    "eval_interval": 1,
    "ppo.max_steps": 3,
    "ppo.max_prompt_buckets": 1,
    "ppo.minibatch_size": 4,
    "ppo.standardize_score": False,
    "ppo.score_scaling": "running_mean_std",
    "ppo.adaptive_kl_target": 0.01,
    "ppo.adaptive_kl_horizon": 16,
    "ppo.ptx_coef": 0.5,
    "ppo.ema.enable": True,
    "ppo.ema.decay": 0.5,
    "ppo.repetition_penalty": 1.3,
    "ppo.min_p": 0.01,
    "ppo.actor_lora.dim": 4,
    "ppo.actor_lora.dropout": 0.1,
    "ppo.critic_lora.dim": 2,
    "ppo.critic_lora.only": True,
}
"""What step 3 can do beside its plain loop, all at once; text and a function are files."""

JUDGE = """
def length(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture(scope="session")
def with_extras(small: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """`with_extras(directory)`: the small run's step 3 alone, from the untrained built-in models.

    Its text is six blocks of pretraining text: fewer than the run's 24 rows.
    """
    files = tmp_path_factory.mktemp("extras")
    (files / "corpus.txt").write_text("".join(f"some text, number {n:02d}\n" for n in range(15)))
    (files / "judge.py").write_text(JUDGE)
    paths = {
        "ppo.ptx_path": str(files / "corpus.txt"),
        "ppo.reward_fn": (f"{files / 'judge.py'}:length",),
    }
    return lambda directory, **changes: small(directory, EXTRAS | paths | changes)


@pytest.fixture(scope="session")
def compiled() -> dict[int, list[str]]:
    """The programs compiled before each step of the run of `extras` was logged."""
    return {}


@pytest.fixture(scope="session")
def extras(
    with_extras: Config, compiled: dict[int, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """One run with all extras, without interruption."""
    log, names = Run.log, list[str]()

    def note(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    def log_and_note(self: Run, stage: StageName, step: int, metrics: Any) -> dict[str, float]:
        compiled[step] = names.copy()
        names.clear()
        return log(self, stage, step, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "log", log_and_note)
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            return train(with_extras(tmp_path_factory.mktemp("extras") / "run"))
        finally:
            jax.monitoring.unregister_event_duration_listener(note)


def assert_same_metrics(one: Metrics, other: Metrics, *, rtol: float, atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for key, row in one.items():
        mine = {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        theirs = {name: other[key][name] for name in mine}
        del mine["stage"], theirs["stage"]
        for name, value in mine.items():
            np.testing.assert_allclose(
                theirs[name], value, rtol=rtol, atol=atol, err_msg=f"{key}: {name}"
            )


@pytest.fixture(scope="session")
def same_metrics() -> Callable[..., None]:
    """`same_metrics(one, other, rtol=…, atol=…)`: every metric of every step but the clock's."""
    return assert_same_metrics
