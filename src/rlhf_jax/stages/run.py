"""One run: its directory, mesh, random keys, metrics, checkpoints and interruptions."""

import json
import math
import shlex
import shutil
import signal
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import yaml

from meshes.layout import MeshShape, make_mesh
from meshes.multihost import any_process, on_first_process
from rlhf_jax.data.sources import local_path
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.runtime.disk import replace_text
from rlhf_jax.runtime.lock import LOCK_FILE, locked
from rlhf_jax.runtime.log import say
from rlhf_jax.runtime.metrics import MetricsWriter, Scalar, last_steps
from rlhf_jax.runtime.profile import PhaseTimer, peak_memory
from rlhf_jax.runtime.report.live import LiveReport
from rlhf_jax.runtime.report.page import State
from rlhf_jax.runtime.report.settings import Baseline
from rlhf_jax.runtime.signals import Stopped, StopSignals
from rlhf_jax.runtime.trackers import RunInfo, open_trackers
from rlhf_jax.stages.config import STAGES, StageName, TrainConfig

CONFIG_FILE, SUMMARY_FILE, METRICS_FILE = "config.yaml", "summary.json", "metrics.jsonl"
FREE_ON_RESUME = {
    "step", "resume", "overwrite_output_dir", "output_dir", "mesh", "inference_tp_size",
    "log_interval", "eval_interval", "eval_batches", "save_interval", "save_total_limit",
    "report_to", "project", "run_name", "tensorboard_path",
}  # fmt: skip
"""Fields that a resumed run may change: where and how it runs, not what it computes. So may it
those of stages that have not begun."""


class Run:
    """What the stages share."""

    def __init__(
        self,
        cfg: TrainConfig,
        shape: MeshShape,
        inference_tp: int,
        baseline: Baseline | None = None,
    ) -> None:
        self.cfg = cfg
        self.directory = Path(cfg.output_dir)
        self.mesh = make_mesh(shape, inference_tp)
        self.dtype = jnp.dtype(cfg.dtype)
        self.metrics = open_metrics(cfg)
        self.report = LiveReport(self.directory, baseline)
        self.timer = PhaseTimer()
        self.signals = StopSignals()
        self._resumes = cfg.resume
        self._seed_key = jax.random.key(cfg.seed)

    def key(self, step: int, purpose: str) -> jax.Array:
        """The random key of one use in one step: the same on every mesh and after a resume."""
        named = jax.random.fold_in(self._seed_key, zlib.crc32(purpose.encode()) & 0x7FFFFFFF)
        return jax.random.fold_in(named, step)

    def log(self, stage: StageName, step: int, metrics: Mapping[str, Scalar]) -> dict[str, float]:
        """Writes a row of metrics with the phase times since the last one, and the memory."""
        row = {**metrics, **self.timer.take(), **peak_memory()}
        values = self.metrics.write(stage, step, row)
        self.report.refresh()
        return values

    def checkpoints(self, stage: StageName) -> Checkpoints:
        return Checkpoints(self.directory / "checkpoints" / stage, self.cfg.save_total_limit)

    def export_dir(self, name: str) -> Path:
        """Where a stage leaves a Hugging Face directory: sft, reward, actor or critic."""
        return self.directory / name

    def is_done(self, stage: StageName) -> bool:
        """Whether the summary lists this stage: it ended and its model is exported."""
        return stage in read_summary(self.directory)

    def finish_stage(self, stage: StageName, results: Mapping[str, Any]) -> None:
        """Records a stage's results in the summary, which marks it done.

        The other processes go on once all that the stage leaves is written.
        """

        def write() -> None:
            summary = read_summary(self.directory) | {stage: finite(results)}
            text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
            replace_text(self.directory / SUMMARY_FILE, text)

        on_first_process(write)
        self.report.write(State("running"))

    def due(self, interval: int, step: int, last: int) -> bool:
        """Whether something with this interval happens after `step` steps, or they were all."""
        return step == last or (interval > 0 and step % interval == 0)

    def begin(self, stage: StageName, start: int | None) -> None:
        """Says after which step a resumed stage goes on (None: it has no checkpoint), and drops the
        rows of the steps that it does again.
        """
        if not self.cfg.resume:
            return
        if start is not None:
            say(f"{stage}: resumed after step {start}")
        elif self._resumes:  # the stages behind it were never begun
            say(f"{stage}: no checkpoint, starts anew")
        self._resumes = False
        self.metrics.drop(stage, after=-1 if start is None else start)

    @property
    def interrupted(self) -> bool:
        """Whether ctrl-C or SIGTERM reached this process."""
        return self.signals.came is not None

    def should_stop(self, *, logged: bool) -> bool:
        """Whether a signal reached any process; all of them ask, after every step, and save then.

        Several processes agree only on steps that were logged: to agree they wait for the devices.
        """
        alone = jax.process_count() == 1
        self.signals.saving = (alone or logged) and any_process(self.interrupted)
        return self.signals.saving

    def stop(self, stage: StageName, step: int) -> NoReturn:
        """After a checkpoint was written: says how to go on, and ends the run."""
        say(f"stopped {stage} after step {step}; go on with the same command and --resume")
        terminated = any_process(self.signals.came == signal.SIGTERM)
        raise Stopped(signal.SIGTERM if terminated else signal.SIGINT)


def open_metrics(cfg: TrainConfig) -> MetricsWriter:
    """The metrics file of a run, with its trackers."""
    directory = Path(cfg.output_dir)
    file = directory / METRICS_FILE
    info = RunInfo(
        directory, flatten(cfg), cfg.project, cfg.run_name, cfg.tensorboard_path, cfg.resume
    )
    return MetricsWriter(file, open_trackers(cfg.report_to, info, last_steps(file)))


def finite(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results with null for numbers that are not finite: JSON has no others."""
    return {
        name: finite(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in results.items()
    }


def read_summary(directory: Path) -> dict[str, Any]:
    """The results of the stages that ended, by stage."""
    path = directory / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@contextmanager
def prepared_directory(cfg: TrainConfig, config_yaml: str) -> Iterator[None]:
    """Makes the output directory, or checks that the run in it is the one to go on with; no other
    run may have it while inside.

    Raises:
        ValueError: a run is writing it; it holds another run, or one with other settings; it is a
            file; or there is nothing to resume.
        OSError: it cannot be written.
    """
    directory = Path(cfg.output_dir)
    with ExitStack() as held:
        with told_as_output_dir(directory):
            if (directory / LOCK_FILE).exists():
                held.enter_context(locked(directory))
                check_directory(cfg, directory)
            else:  # no lock is left in a directory of something else
                check_directory(cfg, directory)
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(directory))
                check_directory(cfg, directory)  # another run may have begun
            if cfg.overwrite_output_dir:
                clear(directory)
            advice = "Free some space, or use another --output-dir"
            replace_text(directory / CONFIG_FILE, startable(config_yaml), advice)
        yield


@contextmanager
def told_as_output_dir(directory: Path) -> Iterator[None]:
    """OSError with the flag in front of what the system says."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it is told already
            raise
        raise OSError(
            f"--output-dir={directory} cannot be used: {error.strerror}; choose another "
            "--output-dir"
        ) from error


def check_directory(cfg: TrainConfig, directory: Path) -> None:
    """ValueError where this run may not write there; writes nothing into what is none of ours."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output-dir={directory}: is a file; name a directory")
    config_file = directory / CONFIG_FILE
    holds_run = config_file.exists()
    if cfg.resume:
        if not holds_run:
            raise ValueError(f"--resume: {directory} holds no run (no {CONFIG_FILE})")
        saved = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        check_same_settings(cfg, saved, begun_stages(directory))
    elif directory.exists() and any(path.name != LOCK_FILE for path in directory.iterdir()):
        if not (cfg.overwrite_output_dir and holds_run):
            what = "another run" if holds_run else "files of something else"
            ways = "--resume to go on with it, --overwrite-output-dir to delete it, or "
            raise ValueError(
                f"{directory} holds {what}: use {ways if holds_run else ''}another --output-dir"
            )
        check_keeps_inputs(cfg, directory)


def clear(directory: Path) -> None:
    """Deletes all but the lock, which is held."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def check_keeps_inputs(cfg: TrainConfig, directory: Path) -> None:
    """ValueError where deleting the directory would delete what the run reads."""
    data = (*cfg.data.data_path, *cfg.data.sft_only_data_path)
    inputs = [cfg.actor_model, cfg.reward_model, *(str(local_path(path)) for path in data)]
    inputs += [cfg.ppo.ptx_path] if cfg.ppo.ptx_path is not None else []
    modules = [source.rpartition(":")[0] for source in cfg.ppo.reward_fn]
    inputs += [module for module in modules if module.endswith(".py")]
    root = directory.resolve()
    inside = [n for n in inputs if Path(n).expanduser().resolve().is_relative_to(root)]
    if inside:
        raise ValueError(
            f"--overwrite-output-dir would delete {', '.join(inside)}, which this run reads: "
            "use another --output-dir"
        )


def startable(config_yaml: str) -> str:
    """The config as one that starts a run elsewhere, however this one was started."""
    config = yaml.safe_load(config_yaml) | {"resume": False, "overwrite_output_dir": False}
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def begun_stages(directory: Path) -> set[StageName]:
    """The stages of a run that have a checkpoint or are done; any other starts from nothing."""
    done = read_summary(directory)
    return {
        stage
        for stage in STAGES.values()
        if stage in done
        or any(path.name.isdigit() for path in (directory / "checkpoints" / stage).glob("*"))
    }


def check_same_settings(
    cfg: TrainConfig, saved: Mapping[str, Any], begun: Collection[StageName]
) -> None:
    """ValueError that lists every setting in which a resumed run differs from its config.yaml.

    Those of a stage that has not begun may change.
    """
    now = flatten(cfg)
    before = flatten_mapping(saved)
    free = FREE_ON_RESUME | (set(STAGES.values()) - set(begun))
    names = [name for name in now if name.split(".")[0] not in free]
    differing = [
        f"--{name.replace('_', '-')}: {before[name]} then, {now[name]} now"
        for name in names
        if name in before and str(before[name]) != str(now[name])
    ]
    if differing:
        path = Path(cfg.output_dir) / CONFIG_FILE
        raise ValueError(
            f"--resume: {cfg.output_dir} was started with other settings:\n  "
            + "\n  ".join(differing)
            + f"\nuse the same ones (--resume --config={shlex.quote(str(path))}), or a new "
            "--output-dir"
        )


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Fields of nested dataclasses by dotted name; sequences as lists."""
    flat: dict[str, Any] = {}
    assert is_dataclass(config)
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            flat |= flatten(value, f"{prefix}{item.name}.")
        else:
            flat[prefix + item.name] = list(value) if isinstance(value, tuple) else value
    return flat


def flatten_mapping(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten_mapping(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
