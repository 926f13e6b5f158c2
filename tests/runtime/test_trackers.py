"""Trackers get the rows of metrics.jsonl once, and a resumed run goes on where it stopped."""

import math
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlhf_jax.runtime import trackers
from rlhf_jax.runtime.metrics import MetricsWriter, last_steps, read_rows
from rlhf_jax.runtime.trackers import RunInfo, check_installed, open_trackers, read_state

SETTINGS = {"seed": 7, "ppo.kl_coef": 0.5, "resume": False, "mesh": None, "step": [1, 2]}


def info(directory: Path, **changes: Any) -> RunInfo:
    return RunInfo(directory, SETTINGS, **changes)


def writer(tmp_path: Path, *names: Any, **changes: Any) -> MetricsWriter:
    """As a run opens it."""
    file = tmp_path / "metrics.jsonl"
    return MetricsWriter(file, open_trackers(names, info(tmp_path, **changes), last_steps(file)))


# --- TensorBoard: the events are read by the record format and protobuf's wire format alone


def records(path: Path) -> list[bytes]:
    """TFRecord: length (8 bytes), its checksum (4), the data, its checksum (4)."""
    raw, found, at = path.read_bytes(), [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<Q", raw, at)
        found.append(raw[at + 12 : at + 12 + length])
        at += 16 + length
    return found


def varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(raw: bytes) -> list[tuple[int, Any]]:
    """Field number and value of a protobuf message, in order."""
    found, at = [], 0
    while at < len(raw):
        key, at = varint(raw, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(raw, at)
        elif kind == 1:
            value, at = struct.unpack_from("<d", raw, at)[0], at + 8
        elif kind == 5:
            value, at = struct.unpack_from("<f", raw, at)[0], at + 4
        else:
            length, at = varint(raw, at)
            value, at = raw[at : at + length], at + length
        found.append((number, value))
    return found


def scalars(directory: Path) -> dict[tuple[str, int], list[float]]:
    """Event.step is field 2, Event.summary 5; Summary.value 1; its tag 1, its simple_value 2."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(directory.glob("events.*")):
        for event in map(fields, records(path)):
            step = dict(event).get(2, 0)
            for _, value in fields(dict(event).get(5, b"")):
                parts = dict(fields(value))
                if 2 in parts:
                    found.setdefault((parts[1].decode(), step), []).append(parts[2])
    return found


def test_tensorboard_has_every_row_and_the_settings(tmp_path: Path) -> None:
    with writer(tmp_path, "tensorboard") as metrics:
        metrics.write("sft", 0, {"loss": 2.0})
        metrics.write("sft", 10, {"loss": 1.5, "lr": 0.25})
        metrics.write("ppo", 10, {"objective/kl": 3.0})
    assert scalars(tmp_path / "tensorboard") == {
        ("sft/loss", 0): [2.0],
        ("sft/loss", 10): [1.5],
        ("sft/lr", 10): [0.25],
        ("ppo/objective/kl", 10): [3.0],
    }
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"ppo.kl_coef" in events.read_bytes()


def test_what_is_no_number_is_shown_as_such(tmp_path: Path) -> None:
    """The file says null; a tracker gets the value itself, and the other metrics of the row."""
    with writer(tmp_path, "tensorboard") as metrics:
        metrics.write("sft", 1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    found = scalars(tmp_path / "tensorboard")
    assert math.isnan(found["sft/loss", 1][0])
    assert (found["sft/grad_norm", 1], found["sft/lr", 1]) == ([math.inf], [0.5])
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["loss"], sorted(row["nonfinite"])) == (None, ["grad_norm", "loss"])


def test_without_trackers_no_file_is_left(tmp_path: Path) -> None:
    assert open_trackers([], info(tmp_path), {}) == []
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_sends_no_step_twice(tmp_path: Path) -> None:
    """It repeats the steps after its checkpoint, and PPO measures step 0 once more."""
    with writer(tmp_path, "tensorboard") as metrics:
        for step in (0, 1, 2, 3):
            metrics.write("ppo", step, {"kl": step})
    with writer(tmp_path, "tensorboard", resumed=True) as metrics:
        for step in (0, 3, 4):
            metrics.write("ppo", step, {"kl": step})
    assert scalars(tmp_path / "tensorboard") == {("ppo/kl", n): [float(n)] for n in range(5)}


def test_event_files_go_where_they_are_wanted(tmp_path: Path) -> None:
    with writer(tmp_path, "tensorboard", tensorboard_path=str(tmp_path / "else")) as metrics:
        metrics.write("sft", 0, {"loss": 2.0})
    assert scalars(tmp_path / "else")
    assert not (tmp_path / "tensorboard").exists()


# --- W&B and trackio: what their modules are called with


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, **kwargs: Any) -> None:
        self.calls.append(("define", name, kwargs))

    def log(self, metrics: dict[str, float], **kwargs: Any) -> None:
        self.calls.append(("log", metrics, kwargs))

    def finish(self, **kwargs: Any) -> None:
        self.calls.append(("finish", kwargs))


class FakeModule(types.ModuleType):
    """`init` keeps its arguments and returns a FakeRun."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inits: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.refuses = False
        self.errors = types.SimpleNamespace(Error=RuntimeError)

    def init(self, **kwargs: Any) -> FakeRun:
        if self.refuses:
            raise RuntimeError("no API key\n  configured")
        self.inits.append(kwargs)
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    def install(name: str) -> FakeModule:
        module = FakeModule(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def test_wandb_counts_each_stage_by_its_own_steps(tmp_path: Path, fake) -> None:
    module = fake("wandb")
    with writer(tmp_path, "wandb", project="mine", name="first") as metrics:
        metrics.write("sft", 10, {"loss": 1.0})
        metrics.write("sft", 20, {"loss": 0.5})
        metrics.write("ppo", 1, {"kl": 2.0})
    (init,), (run,) = module.inits, module.runs
    assert (init["project"], init["name"], init["dir"]) == ("mine", "first", str(tmp_path))
    assert init["config"] == SETTINGS
    assert run.calls == [
        ("define", "sft/step", {}),
        ("define", "sft/*", {"step_metric": "sft/step"}),
        ("log", {"sft/step": 10, "sft/loss": 1.0}, {}),
        ("log", {"sft/step": 20, "sft/loss": 0.5}, {}),
        ("define", "ppo/step", {}),
        ("define", "ppo/*", {"step_metric": "ppo/step"}),
        ("log", {"ppo/step": 1, "ppo/kl": 2.0}, {}),
        ("finish", {"exit_code": 0}),
    ]


def test_trackio_gets_stage_and_step(tmp_path: Path, fake) -> None:
    module = fake("trackio")
    with writer(tmp_path, "trackio") as metrics:
        metrics.write("sft", 10, {"loss": 1.0})
    (init,), (run,) = module.inits, module.runs
    assert init["project"] == trackers.PROJECT
    assert init["name"].startswith(tmp_path.name)
    assert init["config"]["step"] == "1 2"
    assert run.calls == [("log", {"sft/loss": 1.0}, {"step": 10}), ("finish", {})]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_is_the_same_run_and_a_new_one_another(name, tmp_path: Path, fake) -> None:
    module, key = fake(name), "id" if name == "wandb" else "name"
    for resumed in (False, True, False):
        with writer(tmp_path, name, resumed=resumed) as metrics:
            metrics.write("sft", 5, {"loss": 1.0})
    first, second, third = module.inits
    assert first[key] == second[key] != third[key]
    assert [init["resume"] == "allow" for init in module.inits] == [False, True, False]
    assert [any(call[0] == "log" for call in run.calls) for run in module.runs] == [
        True, False, True,
    ]  # fmt: skip


def test_a_tracker_that_joins_later_gets_all_rows_from_then_on(tmp_path: Path, fake) -> None:
    with writer(tmp_path) as metrics:
        metrics.write("ppo", 3, {"kl": 1.0})
    module = fake("wandb")
    with writer(tmp_path, "wandb", resumed=True) as metrics:
        metrics.write("ppo", 3, {"kl": 1.0})
    assert ("log", {"ppo/step": 3, "ppo/kl": 1.0}, {}) in module.runs[0].calls


def test_a_failed_run_is_marked_and_closed(tmp_path: Path, fake) -> None:
    module = fake("wandb")
    with pytest.raises(OSError, match="lost"), writer(tmp_path, "wandb"):
        raise OSError("lost")
    assert module.runs[0].calls == [("finish", {"exit_code": 1})]


def test_a_tracker_that_refuses_says_so_in_a_line(tmp_path: Path, fake) -> None:
    fake("wandb").refuses = True
    with pytest.raises(ValueError, match=r"^--report-to wandb: no API key configured$"):
        writer(tmp_path, "wandb")


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MODULES", {"wandb": "no_such_module"})
    with pytest.raises(ValueError, match=r'pip install "rlhf-jax\[wandb\]"'):
        check_installed(["wandb"])


def test_only_the_first_process_tracks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers.jax, "process_index", lambda: 1)
    assert open_trackers(["tensorboard"], info(tmp_path), {}) == []
    assert read_state(info(tmp_path, resumed=True)) == {}
