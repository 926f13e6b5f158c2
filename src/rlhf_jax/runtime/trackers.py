"""Trackers: TensorBoard, Weights & Biases and trackio, fed with the rows of `metrics.jsonl`.

Each is an extra of the package and imported only when it is asked for. Metrics are named
`<stage>/<metric>` and counted by the stage's own steps. `trackers.json` in the run's directory
holds each run's identity, so that a resumed run continues it; rows that were sent before the
interruption are not sent again.
"""

import importlib.util
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

from rlhf_jax.runtime.disk import replace_text

TrackerName = Literal["tensorboard", "wandb", "trackio"]

STATE_FILE = "trackers.json"
PROJECT = "rlhf-jax"
MODULES: dict[TrackerName, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""The module that writes for each tracker; its extra of the package has the tracker's name."""


class Tracker(Protocol):
    """Where metrics go besides the file."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """One row."""
        ...

    def close(self, *, failed: bool) -> None:
        """Everything is sent; `failed` where the run ended with an error."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a tracker shows of a run.

    Attributes:
        directory: the run's own.
        settings: hyper-parameters by dotted name.
        project, name: how trackers file it; the directory's name where `name` is None.
        tensorboard_path: where the event files go; None: `tensorboard/` in the directory.
        resumed: goes on with the run in the directory.
    """

    directory: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    project: str | None = None
    name: str | None = None
    tensorboard_path: str | None = None
    resumed: bool = False

    @property
    def title(self) -> str:
        return self.name or self.directory.resolve().name


def check_installed(names: Sequence[TrackerName]) -> None:
    """ValueError with the command to install what one of these trackers needs."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise ValueError(
                f"--report-to {name} needs the package {MODULES[name]}, which is not installed: "
                f'pip install "rlhf-jax[{name}]", or leave it out'
            )


def open_trackers(
    names: Sequence[TrackerName], info: RunInfo, sent: Mapping[str, int]
) -> list[Tracker]:
    """The trackers of a run, on its first process; none on the others.

    `sent` is the last step of each stage that an earlier part of the run has logged.
    """
    if jax.process_index() != 0:
        return []
    state = read_state(info)
    makers = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
    trackers: list[Tracker] = []
    for name in dict.fromkeys(names):
        known = name in state
        identity = state.setdefault(name, secrets.token_hex(4))
        tracker = makers[name](info, identity, known)
        trackers.append(NewRows(tracker, sent) if known else tracker)
    if state:
        replace_text(info.directory / STATE_FILE, json.dumps(state) + "\n")
    return trackers


def read_state(info: RunInfo) -> dict[str, str]:
    """Each tracker's id of the run that is resumed; nothing for a new run."""
    path = info.directory / STATE_FILE
    if not info.resumed or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


class NewRows:
    """Passes on the rows that the tracker does not have yet: none of them can take one back."""

    def __init__(self, tracker: Tracker, sent: Mapping[str, int]) -> None:
        self._tracker, self._sent = tracker, sent

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._sent.get(stage, -1):
            self._tracker.log(stage, step, metrics)

    def close(self, *, failed: bool) -> None:
        self._tracker.close(failed=failed)


class TensorBoard:
    """Event files with the settings as hyper-parameters, through tensorboardX."""

    def __init__(self, info: RunInfo, identity: str, known: bool) -> None:
        module = importlib.import_module("tensorboardX")
        path = info.tensorboard_path or str(info.directory / "tensorboard")
        # Files are named by the second: a quick resume would write over the first one.
        part = f".{identity}.{secrets.token_hex(2)}"
        self._writer = module.SummaryWriter(path, filename_suffix=part)
        if not known:
            plain = {name: plain_value(value) for name, value in info.settings.items()}
            for summary in module.summary.hparams(plain, {}):
                self._writer.file_writer.add_summary(summary)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()


class WandB:
    """A run of Weights & Biases; with WANDB_MODE=offline it is written to `wandb/` alone."""

    def __init__(self, info: RunInfo, identity: str, known: bool) -> None:
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=info.project or PROJECT,
                name=info.title,
                id=identity,
                resume="allow" if known else None,
                dir=str(info.directory),
                config=dict(info.settings),
            )
        except wandb.errors.Error as error:
            raise ValueError(f"--report-to wandb: {' '.join(str(error).split())}") from error
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        count = f"{stage}/step"
        if stage not in self._stages:  # W&B's own step only rises, through all stages
            self._stages.add(stage)
            self._run.define_metric(count)
            self._run.define_metric(f"{stage}/*", step_metric=count)
        self._run.log({count: step, **prefixed(stage, metrics)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, in its local store or where its own settings say."""

    def __init__(self, info: RunInfo, identity: str, known: bool) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=info.project or PROJECT,
            name=f"{info.title}-{identity}",
            resume="allow" if known else "never",
            config={name: plain_value(value) for name, value in info.settings.items()},
            embed=False,
        )

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(prefixed(stage, metrics), step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._run.finish()


def prefixed(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their stage's name."""
    return {f"{stage}/{name}": value for name, value in metrics.items()}


def plain_value(value: Any) -> str | float | bool:
    """A setting as a number, a switch or text."""
    if isinstance(value, bool | int | float | str):
        return value
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
