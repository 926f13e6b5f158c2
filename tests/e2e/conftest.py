"""Small runs of all stages through the pipeline, and what they left."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_jax.cli import to_yaml
from rlhf_jax.cli.values import replace_fields
from rlhf_jax.recipes.catalog import make_recipe
from rlhf_jax.runtime.metrics import read_rows
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.pipeline import run_pipeline

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

CLOCK = ("time", "timing_s/", "perf/")
"""Beginnings of metric names that no two runs share."""

type Metrics = dict[tuple[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The directory of a run, and readers of what is in it."""

    directory: Path

    def metrics(self) -> Metrics:
        """The rows of metrics.jsonl by stage and step."""
        rows = read_rows(self.directory / "metrics.jsonl")
        return {(row["stage"], row["step"]): row for row in rows}

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
