"""The course of several runs as one SVG: a panel a chart, a line a seed.

It stands alone, as an image does, and has a ground of its own: it can be read on a light and on a
dark page.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlhf_jax.evaluation.course import Points, is_held_out
from rlhf_jax.runtime.report.charts import NUM_COLOURS

COLUMNS = 3
WIDTH, HEIGHT = 310, 210
"""Of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 46, 28
"""Around its curves."""
EDGE = 14
"""Where titles begin."""
HEAD = 34
NUM_TICKS = 4
STAGES = {"sft": "step 1", "reward": "step 2", "ppo": "PPO", "dpo": "DPO"}

LIGHT = (
    "#ffffff #1b1f24 #5d6672 #d9dee4 "
    "#2a6fdb #d9601a #178a5b #a03bb5 #8d9aa9 #c2255c #0b8a9c #a37a00"
)
DARK = (
    "#14171b #e4e8ed #98a2ae #333a43 "
    "#6ea8fe #ff9b5e #4ccf94 #d68bf0 #77828f #ff7aa8 #4fd0e0 #e6c04a"
)
"""As the report's: paper, ink, quiet, line, and the colours of curves."""

STYLE = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--quiet); }
.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.paper { fill: var(--paper); stroke: var(--line); }
.grid { stroke: var(--line); fill: none; }
.mark { stroke: var(--quiet); stroke-dasharray: 2 3; }
path { fill: none; stroke-width: 1.4; stroke-linejoin: round; }
.held { stroke-dasharray: 5 3; }
"""


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def picture(runs: Sequence[dict[str, Any]], name: str) -> str:
    """The SVG of what `measure_run` found; ValueError where no run has curves."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for chart in run.get("course", ()):
            panels.setdefault((chart["stage"], chart["title"]), []).append(chart)
    if not panels:
        raise ValueError(
            f"{name}: no run has curves: measure them again (--again), or put metrics.jsonl beside "
            "measured.json"
        )
    columns = min(COLUMNS, len(panels))
    width, height = columns * WIDTH, HEAD + -(-len(panels) // columns) * HEIGHT
    seeds = ", ".join(str(run["seed"]) for run in runs)
    head = f"{name}: seed{'s' if runs[1:] else ''} {seeds}"
    drawn = "\n".join(
        panel(charts, n % columns * WIDTH, HEAD + n // columns * HEIGHT)
        for n, charts in enumerate(panels.values())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{escape(head)}</title>\n'
        f"<style>{styles()}</style>\n"
        f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>\n'
        f'<text class="title" x="{EDGE}" y="23">{escape(head)}</text>\n{drawn}\n</svg>\n'
    )


def styles() -> str:
    """The style sheet, in both schemes."""
    names = ["paper", "ink", "quiet", "line", *(f"c{n}" for n in range(NUM_COLOURS))]

    def scheme(colours: str) -> str:
        pairs = zip(names, colours.split(), strict=True)
        return "svg { " + " ".join(f"--{name}: {colour};" for name, colour in pairs) + " }"

    curves = "\n".join(
        f"path.c{n}, circle.c{n} {{ stroke: var(--c{n}); }} "
        f"tspan.c{n}, circle.c{n} {{ fill: var(--c{n}); }}"
        for n in range(NUM_COLOURS)
    )
    dark = f"@media (prefers-color-scheme: dark) {{ {scheme(DARK)} }}"
    return f"\n{scheme(LIGHT)}\n{dark}{STYLE}{curves}\n"


def panel(charts: Sequence[dict[str, Any]], left: float, top: float) -> str:
    """One chart of all runs."""
    first, names = charts[0], list(dict.fromkeys(n for chart in charts for n in chart["lines"]))
    every = [point for chart in charts for line in chart["lines"].values() for point in line]
    values = [value for _, value in every] + [0.0] * first["zero"]
    values += [] if first["mark"] is None else [first["mark"]]
    ticks = ticks_of(min(values), max(values))
    steps = [step for step, _ in every]
    x = Scale(min(steps), max(*steps, min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    unit = f" ({first['unit']})" if first["unit"] else ""
    title = f"{STAGES.get(first['stage'], first['stage'])}: {first['title']}"
    parts = [
        f'<g transform="translate({left} {top})">',
        f'<text class="title" x="{EDGE}" y="16">{escape(title)}</text>',
        legend(names, unit),
        *axes(x, y, ticks),
    ]
    if first["mark"] is not None:
        parts.append(f'<path class="mark" d="M{LEFT} {y(first["mark"])}H{WIDTH - RIGHT}"/>')
    for colour, name in enumerate(names):
        for chart in charts:
            parts += curve(chart["lines"].get(name, []), colour, is_held_out(name), x, y)
    return "\n".join([*parts, "</g>"])


def legend(names: Sequence[str], unit: str) -> str:
    """What the colours are."""
    kinds = [kind_of(name) for name in names]
    labels = [
        kind if kinds.count(kind) == 1 else name.rpartition("_")[2]
        for kind, name in zip(kinds, names, strict=True)
    ]
    spans = "  ".join(
        f'<tspan class="c{colour}">{escape(label)}</tspan>' for colour, label in enumerate(labels)
    )
    return f'<text x="{EDGE}" y="33" xml:space="preserve">{spans}{escape(unit)}</text>'


def kind_of(name: str) -> str:
    """Whose values a metric has."""
    if name.startswith("eval/ema_"):
        return "held out, EMA"
    return "held out" if is_held_out(name) else "training"


def axes(x: Scale, y: Scale, ticks: Sequence[float]) -> Iterator[str]:
    """Lines and numbers of both axes."""
    for tick in ticks:
        yield f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>'
    for step, anchor in ((x.low, "start"), (x.high, "end")):
        place = f'x="{x(step)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}"'
        yield f"<text {place}>step {step:.0f}</text>"


def curve(points: Points, colour: int, held_out: bool, x: Scale, y: Scale) -> Iterator[str]:
    """A line; of an evaluation dashed, with dots."""
    places = [(x(step), y(value)) for step, value in points]
    if len(places) > 1:
        kind = f"c{colour} held" if held_out else f"c{colour}"
        line = "L".join(f"{across} {down}" for across, down in places)
        yield f'<path class="{kind}" d="M{line}"/>'
    if held_out or len(places) == 1:
        for across, down in places:
            yield f'<circle class="c{colour}" cx="{across}" cy="{down}" r="2"/>'


def ticks_of(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `NUM_TICKS` steps of 1, 2 or 5
    times a power of ten.
    """
    rough = (high - low or abs(high) or 1.0) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{n * step:.10g}") for n in range(first, max(last, first + 1) + 1)]
