"""What a run writes while it trains: one JSON object a line, readable while it grows.

`metrics.jsonl`: {"stage", "step", "time", and the metrics}; `samples/<stage>.jsonl`: the fields of
`Sample` and the step. JSON knows no NaN or infinity: such a number is written as null and its
name is listed under "nonfinite". Both files are appended to. A resumed run repeats the steps after
its checkpoint: it drops their rows from `metrics.jsonl`, and of what is written twice nevertheless
the last counts.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import jax
import numpy as np

from rlhf_jax.runtime.disk import replace_text, writing
from rlhf_jax.runtime.trackers import Tracker

type Scalar = float | int | np.ndarray | np.generic | jax.Array


class MetricsWriter:
    """Appends rows to `path`, and sends them to the trackers, which the end of the context closes.

    Of several processes the first writes; the others return values.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()):
        self.path = Path(path)
        self.trackers = trackers
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for tracker in self.trackers:
            tracker.close(failed=kind is not None)

    def write(self, stage: str, step: int, metrics: Mapping[str, Scalar]) -> dict[str, float]:
        """Fetch all device scalars in one transfer, write a row, and return it as floats.

        Until then metrics stay on the device: call it at log steps, not at every step. A metric
        that is no scalar is a ValueError.
        """
        values = _to_floats(metrics)
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"stage": stage, "step": step, "time": time.time()}
        row |= {name: None if name in nonfinite else value for name, value in values.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        _append(self.path, [row])
        for tracker in self.trackers:
            tracker.log(stage, step, values)
        return values

    def drop(self, stage: str, after: int) -> None:
        """Takes the stage's rows of later steps out of the file; the trackers keep theirs."""
        if jax.process_index() != 0 or not self.path.exists():
            return
        rows = read_rows(self.path)
        kept = [row for row in rows if row["stage"] != stage or row["step"] <= after]
        replace_text(self.path, _lines(kept))


@dataclass(frozen=True)
class Sample:
    """A prompt and what was said to it; `before` is the model that the stage started from."""

    prompt: str
    answer: str
    score: float | None = None
    answer_before: str | None = None
    score_before: float | None = None


class SampleTable:
    """Appends samples to `path` (`samples/<stage>.jsonl`), each row with its step."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """One row a sample. Scores that are not finite are written as null."""
        _append(self.path, [{"step": step, **_finite(asdict(sample))} for sample in samples])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in order; of rows with equal stage and step the last one.

    A last line that a killed run left unfinished is skipped; another broken line is a ValueError.
    """
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for row in whole_rows(path):
        key = (row["stage"], row["step"])
        rows.pop(key, None)
        rows[key] = row
    return list(rows.values())


def whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a file of JSON lines; as `read_rows` of a broken one."""
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            # What is cut may be a letter of several bytes: decoded line by line.
            row = json.loads(line.decode()) if line else None
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is no JSON ({error}): {line[:80]!r}"
            ) from error
        if row is not None:
            yield row


def last_steps(path: Path) -> dict[str, int]:
    """The last step of each stage in a metrics file; empty without one."""
    rows = read_rows(path) if Path(path).exists() else []
    return {
        stage: max(row["step"] for row in rows if row["stage"] == stage)
        for stage in {row["stage"] for row in rows}
    }


def _to_floats(metrics: Mapping[str, Scalar]) -> dict[str, float]:
    values = jax.device_get(dict(metrics))
    for name, value in values.items():
        if np.ndim(value):
            raise ValueError(
                f"metric {name} has shape {np.shape(value)}, and a row holds scalars: "
                "reduce it (mean, sum) before it is logged"
            )
    return {name: float(value) for name, value in values.items()}


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    broken = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in broken else value for name, value in row.items()}


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Whole lines in one write. Half a line that a killed run left at the end makes room."""
    if jax.process_index() != 0:
        return
    with writing(path.name, path.parent), path.open("ab+") as file:
        file.truncate(_whole_lines_bytes(file))
        file.write(_lines(rows).encode())


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _whole_lines_bytes(file: BinaryIO) -> int:
    """The size of `file` up to and with its last line break."""
    end = file.seek(0, 2)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
