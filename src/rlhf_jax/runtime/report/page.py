"""The page: one HTML file with its styles, scripts and data inside. It loads nothing."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf_jax.runtime.disk import replace_text
from rlhf_jax.runtime.report.charts import PHASES, curves, phase_colours
from rlhf_jax.runtime.report.findings import find
from rlhf_jax.runtime.report.reading import RunRecord, Stage, read_run
from rlhf_jax.runtime.report.settings import Baseline, setting_lines
from rlhf_jax.runtime.report.verdict import figures, stage_name, verdict

REPORT_FILE = "report.html"
MAX_EVALUATIONS = 12
MAX_CHARACTERS = 6000
"""Of one prompt or answer in the page."""

HERE = Path(__file__).parent


@dataclass(frozen=True)
class State:
    """How a run stands: `why` says what ended it."""

    name: Literal["running", "finished", "interrupted", "failed", "unfinished"]
    why: str = ""

    @property
    def says(self) -> str:
        """A line for a person."""
        return {
            "running": "still running when this page was written",
            "finished": "finished",
            "interrupted": "interrupted; the same command with --resume goes on",
            "failed": f"failed: {self.why}",
            "unfinished": "not finished (running, interrupted or failed)",
        }[self.name]


def build_report(
    directory: Path, *, state: State | None = None, baseline: Baseline | None = None
) -> Path:
    """Writes `report.html` of the run in `directory`, whole or not at all, and returns its path.

    Without a `state` the summary tells whether the run has finished.

    Raises:
        FileNotFoundError, ValueError: no run is there, or a file of it is broken.
    """
    run = read_run(directory)
    text = render(run, state or known_state(run), baseline)
    path = Path(directory) / REPORT_FILE
    text = text.encode("utf-8", "backslashreplace").decode()
    replace_text(path, text, advice="Free some space")
    return path


def known_state(run: RunRecord) -> State:
    """Finished where the summary holds every stage that the config asks for."""
    done = bool(run.wanted) and all(name in run.summary for name in run.wanted)
    return State("finished" if done else "unfinished")


def render(run: RunRecord, state: State, baseline: Baseline | None) -> str:
    """The page's text."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    warnings = find(run)
    settings = list(setting_lines(run.config, baseline.settings if baseline else {}))
    seconds = sum(stage.seconds for stage in run.stages.values())
    data = {"stages": curves(run), "samples": all_samples(run)}
    return environment.get_template("page.html").render(
        run=run,
        state=state,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        verdict=verdict(run, len(warnings)),
        figures=figures(run),
        warnings=warnings,
        phases=[stage_phases(stage) for stage in run.stages.values()],
        seconds=duration(seconds) if seconds else "",
        settings=settings,
        num_changed=sum(line.changed for line in settings),
        baseline=baseline,
        samples_cut=cut_note(run),
        stage_name=stage_name,
        css=Markup(read("page.css")),
        script=Markup(read("charts.js") + read("page.js")),
        data=Markup(embedded(data)),
    )


def read(name: str) -> str:
    """A file beside this one."""
    return (HERE / name).read_text(encoding="utf-8")


def embedded(data: object) -> str:
    """JSON that can stand in a script element, whatever the texts in it say."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def duration(seconds: float) -> str:
    """As a person says it: 3 h 05 min, 4 min 10 s, 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.1f} s"


def stage_phases(stage: Stage) -> dict[str, Any]:
    """Where the time of a stage went, the known phases first."""
    seconds: dict[str, float] = {}
    for name in stage.metrics:
        phase = name.removeprefix("timing_s/")
        if phase not in (name, "step"):
            seconds[phase] = sum(stage.series(name))
    total = sum(seconds.values())
    names = sorted(seconds, key=lambda phase: (*PHASES, phase).index(phase))
    # Supervised steps are no phase of their own.
    rest = "other (data, checkpoints, this report)" if "update" in seconds else "training"
    parts = [
        {
            "name": rest if name == "other" else name,
            "share": seconds[name] / total if total else 0.0,
            "seconds": duration(seconds[name]),
            "colour": colour,
        }
        for name, colour in zip(names, phase_colours(names), strict=True)
    ]
    steps = f"{stage.steps[0]}–{stage.steps[-1]}" if stage.steps else ""
    return {"stage": stage.name, "total": duration(stage.seconds), "steps": steps, "parts": parts}


def shown_steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The evaluations whose samples are in the page: first and last, evenly spaced between."""
    steps = sorted({row["step"] for row in rows})
    if len(steps) <= MAX_EVALUATIONS:
        return steps
    gaps = MAX_EVALUATIONS - 1
    return [steps[round(n * (len(steps) - 1) / gaps)] for n in range(MAX_EVALUATIONS)]


def all_samples(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """The samples of the page by stage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for stage, rows in run.samples.items():
        steps = shown_steps(rows)
        chosen = [row for row in rows if row["step"] in steps]
        if chosen:
            found[stage] = [{k: shortened(v) for k, v in row.items()} for row in chosen]
    return found


def shortened(value: Any) -> Any:
    """Long texts lose their end, and say so."""
    if not isinstance(value, str) or len(value) <= MAX_CHARACTERS:
        return value
    return f"{value[:MAX_CHARACTERS]} … ({len(value) - MAX_CHARACTERS} more characters)"


def cut_note(run: RunRecord) -> str:
    """What of the sample tables is not in the page."""
    parts: list[str] = []
    for stage, rows in run.samples.items():
        num, shown = len({row["step"] for row in rows}), len(shown_steps(rows))
        if shown < num:
            parts.append(f"{shown} of {num} evaluations; samples/{stage}.jsonl has all")
    return "; ".join(parts)
