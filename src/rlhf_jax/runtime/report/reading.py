"""What lies in the directory of a run, as the report reads it; all of it may still be missing."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_jax.runtime.metrics import read_rows, whole_rows

NOT_METRICS = {"stage", "step", "time", "nonfinite"}
ORDER = ("sft", "reward", "dpo", "ppo")
STEPS: dict[object, str] = {1: "sft", 2: "reward", 3: "ppo", "dpo": "dpo"}
"""The stage of each value of `step` in config.yaml."""


@dataclass(frozen=True)
class Stage:
    """The rows of one stage, by rising step. A number that was not finite is NaN."""

    name: str
    steps: list[int]
    times: list[float]
    values: list[dict[str, float]]

    @property
    def metrics(self) -> list[str]:
        """Names, in the order of the alphabet."""
        return sorted({name for row in self.values for name in row})

    def series(self, name: str) -> list[float]:
        """The finite values of a metric in order; empty where it was never logged."""
        found = [row[name] for row in self.values if name in row]
        return [value for value in found if math.isfinite(value)]

    @property
    def seconds(self) -> float:
        """From the start of the first row's work to the last row."""
        if not self.times:
            return 0.0
        first = self.values[0].get("timing_s/step", 0.0)
        return max(self.times) - min(self.times) + first


@dataclass(frozen=True)
class RunRecord:
    """A run's directory.

    Attributes:
        stages: by name, in the order in which they run.
        samples: rows of `samples/<stage>.jsonl` by stage, each evaluation once.
        config: config.yaml; empty where it cannot be read.
        summary: summary.json: the results of the stages that ended.
        rows: rows.json: what the stages that began read and dropped.
    """

    directory: Path
    stages: dict[str, Stage] = field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.directory.resolve().name)

    @property
    def wanted(self) -> list[str]:
        """The stages that the config asks for; those with rows where there is no config."""
        steps = self.config.get("step", [])
        return [STEPS[step] for step in steps if step in STEPS] or list(self.stages)


def read_run(directory: Path) -> RunRecord:
    """The run in `directory`.

    Raises:
        FileNotFoundError: there is neither a config nor a row of metrics.
        ValueError: a file is broken other than by a last line that is not whole yet.
    """
    directory = Path(directory)
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    rows = directory / "rows.json"
    if not metrics.exists() and not config.exists():
        raise FileNotFoundError(
            f"{directory} holds no run: there is neither a metrics.jsonl nor a config.yaml in it; "
            "name the --output-dir of one"
        )
    tables = sorted((directory / "samples").glob("*.jsonl"))
    samples = {path.stem: read_samples(path) for path in tables}
    return RunRecord(
        directory,
        stages=by_stage(read_rows(metrics) if metrics.exists() else []),
        samples={stage: samples[stage] for stage in sorted(samples, key=stage_order)},
        config=read_mapping(config),
        summary=read_mapping(directory / "summary.json"),
        rows=json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else {},
    )


def stage_order(name: str) -> tuple[int, str]:
    """Known stages as they run, others behind them."""
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def by_stage(rows: list[dict[str, Any]]) -> dict[str, Stage]:
    """Rows sorted into stages."""
    stages: dict[str, Stage] = {}
    for row in sorted(rows, key=lambda row: (stage_order(row["stage"]), row["step"])):
        stage = stages.setdefault(row["stage"], Stage(row["stage"], [], [], []))
        stage.steps.append(row["step"])
        stage.times.append(row.get("time", 0.0))
        stage.values.append(numbers(row))
    return stages


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row; what is listed under "nonfinite" is null in the file."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in row.items()
        if name not in NOT_METRICS and (value is None or isinstance(value, int | float))
    }


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of a sample table. A resumed run repeats evaluations: the last one counts."""
    blocks: dict[int, list[dict[str, Any]]] = {}
    before: int | None = None
    for row in whole_rows(path):
        step = int(row.get("step", 0))
        if step != before:
            blocks[step] = []
            before = step
        if row not in blocks[step]:  # one evaluation twice in a row: the run went on from there
            blocks[step].append(row)
    return [row for step in sorted(blocks) for row in blocks[step]]


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping; empty without one.

    ValueError where it is broken.
    """
    if not path.exists():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is broken: {' '.join(str(error).split())}") from error
    return found if isinstance(found, dict) else {}
