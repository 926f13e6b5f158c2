"""Directories of runs, as training leaves them."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NUM_ROWS = 40


def ppo_rows(**changes: Any) -> list[dict[str, Any]]:
    """A healthy run: no rule finds anything. A change is a function of the row's number."""
    noise = random.Random(0)
    healthy = {
        "objective/scores": lambda n: 0.05 * n + noise.gauss(0, 0.05),
        "objective/kl": lambda n: 4 * (1 - math.exp(-n / 10)),
        "policy/entropy_avg": lambda n: 1.5 - 0.01 * n,
        "response_length/mean": lambda n: 50 + n % 3,
        "response_length/clip_ratio": lambda n: 0.05,
        "critic/vf_explained_var": lambda n: 0.02 * n - 0.1,
        "policy/clipfrac_avg": lambda n: 0.1,
        "rollout/logprob_diff_mean": lambda n: 0.004,
        "val/skipped": lambda n: 0.0,
    }
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    made = healthy | named
    return [
        {"stage": "ppo", "step": n, "time": 1e9 + n, **{k: f(n) for k, f in made.items()}}
        for n in range(NUM_ROWS)
    ]


def write_run(
    directory: Path,
    rows: Iterable[Mapping[str, Any]] = (),
    *,
    samples: Mapping[str, list[dict[str, Any]]] | None = None,
    summary: Mapping[str, Any] | None = None,
    read: Mapping[str, Any] | None = None,
    config: str | None = "step: [1, 2, 3]\n",
) -> Path:
    """The files of a run as training leaves them; `read` is rows.json."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(lines)
    if config is not None:
        (directory / "config.yaml").write_text(config)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    if read is not None:
        (directory / "rows.json").write_text(json.dumps(read))
    for stage, table in (samples or {}).items():
        (directory / "samples").mkdir(exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in table)
        (directory / "samples" / f"{stage}.jsonl").write_text(text)
    return directory
