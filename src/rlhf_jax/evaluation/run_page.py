"""What `runs.measure_run` found in one or several seeds of a recipe, as a page of Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.evaluation.statistics import Interval

type Measured = dict[str, Any]
type Value = float | None

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MAX_KL = 15.0
MAX_TEXT_CHANGE = 0.1
SHOWN_SAMPLES, SHOWN_CHARACTERS = 6, 500
AFTER = {"actor": "PPO", "actor_ema": "EMA"}


def page_with(runs: Sequence[Measured], page: str, title: str) -> str:
    """The page with its measured part renewed; what people wrote around it stays. Beside it
    belongs the picture `title`.svg.
    """
    tables = f"{BEGIN}\n\n{measured_part(runs, title)}\n{END}"
    if BEGIN not in page or END not in page:
        head = page.rstrip() or f"# {title}"
        return f"{head}\n\n{tables}\n"
    return page[: page.index(BEGIN)] + tables + page[page.index(END) + len(END) :]


def measured_part(runs: Sequence[Measured], title: str) -> str:
    """The picture and all tables."""
    parts = [results(runs), criteria(runs), f"## Curves\n\n![Curves of {title}]({title}.svg)\n"]
    if any(run["reward"] for run in runs):
        parts.append(pairs(runs))
    parts += [lengths(runs), curves(runs), phases(runs), sample_table(runs[0])]
    return "\n".join(parts)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """A section with one table."""
    lines = [f"## {title}", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", *([note, ""] if note else [])])


def number(value: Value, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def spread(values: Sequence[Value]) -> str:
    """Mean and sample deviation over seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return number(known[0])
    return f"{np.mean(known):.3f} ± {np.std(known, ddof=1):.3f}"


def at(run: Measured, path: str) -> Any:
    """`policies/actor/gain/value`; None where a part of it is missing or None."""
    value: Any = run
    for name in path.split("/"):
        value = None if value is None else value.get(name)
    return value


def names_of(runs: Sequence[Measured]) -> list[str]:
    """Heads of columns."""
    return [f"seed {run['seed']}" for run in runs]


def by_run(
    title: str, runs: Sequence[Measured], paths: Sequence[tuple[str, str]], note: str = ""
) -> str:
    """A row a figure, a column a run, and all of them together; figures that no run has are left
    out.
    """
    rows = []
    for label, path in paths:
        values = [at(run, path) for run in runs]
        if any(value is not None for value in values):
            rows.append([label, *map(number, values), spread(values)])
    return table(title, ["", *names_of(runs), "mean ± deviation"], rows, note)


def results(runs: Sequence[Measured]) -> str:
    """Figures of every stage."""
    paths = [
        ("held-out perplexity before step 1", "sft/before"),
        ("after step 1", "sft/after"),
        ("reward model: accuracy", "reward/accuracy/value"),
        ("the longer answer wins: accuracy", "reward/longer_wins_accuracy/value"),
        ("score before PPO", "policies/sft/score_mean"),
        ("its deviation over answers", "policies/sft/score_std"),
        ("tokens an answer before PPO", "policies/sft/length_mean"),
        ("answers cut at the limit before PPO", "policies/sft/truncated"),
    ]
    for policy, name in AFTER.items():
        paths += [
            (f"score, {name}", f"policies/{policy}/score_mean"),
            (f"gain in deviations, {name}", f"policies/{policy}/gain_in_deviations"),
            (f"KL in nats an answer, {name}", f"policies/{policy}/kl/value"),
            (f"answers that score higher than before, {name}", f"policies/{policy}/wins"),
            (f"tokens an answer, {name}", f"policies/{policy}/length_mean"),
            (f"answers cut at the limit, {name}", f"policies/{policy}/truncated"),
        ]
    paths += [
        (f"perplexity of running text, {name}", f"text/{key}")
        for key, name in {"base": "base", "sft": "step 1", **AFTER}.items()
    ]
    rows = [
        f"{at(run, 'reward/pairs') or 'no'} held-out pairs, {run['policies']['prompts']} prompts"
        for run in runs
    ]
    note = (
        f"{'; '.join(dict.fromkeys(rows))}. Answers are sampled at temperature 1. Scores are those "
        "that PPO is rewarded with, before KL and penalties."
    )
    return by_run("Results", runs, paths, note)


def criteria(runs: Sequence[Measured]) -> str:
    """Whether each run did what it is meant to do, with the number behind it."""
    checks: list[tuple[str, Callable[[Measured], str]]] = [
        ("step 1 lowers held-out perplexity", sft_falls),
        ('the reward model beats "the longer answer wins" (95 %)', beats_length),
        (f"PPO gains one deviation at a KL of at most {MAX_KL:g} nats", gains),
        (f"PPO raises the perplexity of text by at most {MAX_TEXT_CHANGE:.0%}", keeps_text),
    ]
    rows = [[label, *(check(run) for run in runs)] for label, check in checks]
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    return table("Asked for", ["", *names_of(runs)], rows)


def verdict(holds: bool, number: str) -> str:
    """A cell of `criteria`."""
    return f"{'yes' if holds else '**no**'}: {number}"


def sft_falls(run: Measured) -> str:
    """Perplexity of held-out answers."""
    sft = run["sft"]
    if sft is None:
        return "–"
    return verdict(sft["after"] < sft["before"], f"{sft['before']:.2f} to {sft['after']:.2f}")


def beats_length(run: Measured) -> str:
    """The paired difference of the two accuracies."""
    if run["reward"] is None:
        return "–"
    better = Interval(**run["reward"]["accuracy_over_longer_wins"])
    return verdict(better.low > 0, str(better))


def gains(run: Measured) -> str:
    """Of runs with a reward model: the gain in deviations of the scores before PPO, and the KL."""
    gain, kl = at(run, "policies/actor/gain_in_deviations"), at(run, "policies/actor/kl/value")
    if gain is None or run["reward"] is None:
        return "–"
    return verdict(gain >= 1 and kl <= MAX_KL, f"{gain:.2f} at {kl:.1f}")


def keeps_text(run: Measured) -> str:
    """The change of perplexity from step 1 to PPO."""
    if run["text"] is None:
        return "–"
    change = run["text"]["actor"] / run["text"]["sft"] - 1
    return verdict(change <= MAX_TEXT_CHANGE, f"{change:+.1%}")


def pairs(runs: Sequence[Measured]) -> str:
    """The reward model by how much longer the better answer is."""
    rows = [
        [
            f"seed {run['seed']}",
            f"{group['from']} to {group['to']}",
            str(group["count"]),
            number(group["accuracy"]),
            number(group["longer_wins_accuracy"]),
        ]
        for run in runs
        if run["reward"]
        for group in run["reward"]["length"]["by_difference"]
    ]
    head = ["", "better answer longer by (tokens)", "pairs", "accuracy", "the longer answer wins"]
    scored = [run["reward"] for run in runs if run["reward"]]
    note = "Differences of accuracy, paired, with 95 % bootstrap: " + "; ".join(
        str(Interval(**reward["accuracy_over_longer_wins"])) for reward in scored
    )
    correlations = ", ".join(number(reward["length"]["score_spearman"]) for reward in scored)
    return table(
        "Reward model by length",
        head,
        rows,
        f"{note}. Rank correlation of score and length: {correlations}.",
    )


def lengths(runs: Sequence[Measured]) -> str:
    """The gain at matched length, by three estimates."""
    rows = []
    for run in runs:
        for policy, name in AFTER.items():
            if policy not in run["policies"]:
                continue
            found = run["policies"][policy]
            parts, near = found["length"]["stratified"], found["length"]["near_pairs"]
            rows.append(
                [
                    f"seed {run['seed']}, {name}",
                    str(Interval(**found["gain"])),
                    written(parts and parts["at_equal_length"]),
                    written(parts and parts["from_length"]),
                    number(parts and parts["length_share"]),
                    written(found["length"]["linear"]),
                    "–" if near is None else f"{written(near['gain'])} ({near['count']})",
                ]
            )
    head = [
        "", "gain", "in bins of length", "from length", "share of length", "linear in length",
        "equally long answers",
    ]  # fmt: skip
    note = (
        "*In bins*: answers of both policies in bins of length; the gain is exactly its part inside"
        " the bins and its part from other shares of the bins (Kitagawa). *Linear*: what is left "
        "of the gain of a prompt where its two answers do not differ in length, by least squares. "
        "*Equally long*: only prompts whose two answers differ by at most 10 % (how many). All "
        "with 95 % intervals over prompts."
    )
    return table("How much of the gain is length", head, rows, note)


def written(interval: dict[str, float] | None) -> str:
    """An interval, or a dash where there is none."""
    return "–" if interval is None else str(Interval(**interval))


def curves(runs: Sequence[Measured]) -> str:
    """PPO's course, the mean over seeds."""
    steps = [row["step"] for row in runs[0]["curve"]]
    seen = [{row["step"]: row for row in run["curve"]} for run in runs]
    metrics = list(dict.fromkeys(name for run in runs for row in run["curve"] for name in row))
    metrics.remove("step")
    rows = [[str(int(step)), *(mean_at(seen, step, name) for name in metrics)] for step in steps]
    return table("PPO", ["iteration", *metrics], rows, "Means over seeds." if runs[1:] else "")


def mean_at(seen: Sequence[dict[float, dict[str, float]]], step: float, name: str) -> str:
    """Over the seeds; empty where one of them lacks this metric at this step: the mean of the
    others is another course.
    """
    values = [rows[step][name] for rows in seen if name in rows.get(step, {})]
    return number(float(np.mean(values))) if len(values) == len(seen) else ""


def phases(runs: Sequence[Measured]) -> str:
    """Wall clock of every stage, the mean over seeds."""
    rows = []
    for stage, found in runs[0]["seconds"].items():
        for phase in found:
            values = [at(run, f"seconds/{stage}/{phase}") for run in runs]
            values = [value for value in values if value is not None]
            rows.append([stage, phase, number(float(np.mean(values)), 1)])
    return table("Seconds", ["stage", "phase", "seconds"], rows, "`all` holds compilation too.")


def sample_table(run: Measured) -> str:
    """The first held-out prompts, not chosen, with the answers before and after."""
    rows = [
        [
            shortened(sample["prompt"]),
            *(
                f"{shortened(sample[side]['text'])} ({sample[side]['score']:.2f})"
                for side in ("sft", "actor")
            ),
        ]
        for sample in run["policies"]["samples"][:SHOWN_SAMPLES]
    ]
    note = f"The first held-out prompts of seed {run['seed']}; scores in brackets."
    return table("Samples", ["prompt", "before PPO", "after PPO"], rows, note)


def shortened(text: str) -> str:
    """One cell of a table; of a long prompt the end."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= SHOWN_CHARACTERS else "… " + line[-SHOWN_CHARACTERS:]
