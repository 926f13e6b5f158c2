"""Reports as tables for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_jax.evaluation.statistics import Interval

console = Console(highlight=False)


def show_compare(report: dict[str, Any], shown: int) -> None:
    """Answers side by side, then what they are like and who wins."""
    names = [report[side]["name"] for side in ("baseline", "model")]
    longest = report["settings"]["max_new_tokens"]
    title = f"{report['rows']} prompts, answers of at most {longest} tokens"
    table = Table("prompt", *names, title=title, show_lines=True)
    for row in report["samples"][:shown]:
        table.add_row(
            Text(row["prompt"].strip()), *(_answer(row[s]) for s in ("baseline", "model"))
        )
    console.print(table)
    facts = Table("", *names)
    for key, name, form in (
        ("mean_tokens", "tokens an answer", ".3g"),
        ("ended", "ended by itself", ".3f"),
    ):
        facts.add_row(name, *(f"{report[side][key]:{form}}" for side in ("baseline", "model")))
    if "scores" in report:
        scores = report["scores"]
        facts.add_row("mean score", *(f"{scores[f'{s}_mean']:.3f}" for s in ("baseline", "model")))
    console.print(facts)
    _lines([f"answers that are equal: {report['equal_answers']}", *_verdict(report)])
    _notes(report)


def _answer(answer: dict[str, Any]) -> Text:
    score = f"\n[score {answer['score']:.3f}]" if "score" in answer else ""
    more = "" if answer["ended"] else " …"
    return Text(answer["text"].strip() + more + score)


def _verdict(report: dict[str, Any]) -> list[str]:
    if "scores" not in report:
        return []
    scores = report["scores"]
    return [
        f"scores by {report['judge']}: {report['model']['name']} wins {scores['wins']}, ties "
        f"{scores['ties']}, loses {scores['losses']}",
        f"win rate (a tie is one half) {Interval(**scores['win_rate'])}, difference of scores "
        f"{Interval(**scores['difference'])} (95 % bootstrap)",
    ]


def show_reward(report: dict[str, Any]) -> None:
    """Accuracy against the longer answer, calibration and length."""
    accuracy = Table("", "accuracy [95 % bootstrap]", title=report["model"])
    for key, name in (
        ("accuracy", "reward model"),
        ("longer_wins_accuracy", "the longer answer wins"),
        ("accuracy_over_longer_wins", "difference, paired"),
    ):
        accuracy.add_row(name, str(Interval(**report[key])))
    console.print(accuracy)
    bins = Table("confidence", "pairs", "mean", "mean margin", "accuracy", title="calibration")
    for each in report["calibration"]["bins"]:
        bins.add_row(
            f"{each['low']:.2f} to {each['high']:.2f}",
            str(each["count"]),
            *(f"{each[key]:.3f}" for key in ("confidence", "margin", "accuracy")),
        )
    console.print(bins)
    title = "better answer longer by (tokens)"
    groups = Table(title, "pairs", "accuracy", "the longer answer wins")
    for each in report["length"]["by_difference"]:
        groups.add_row(
            f"{each['from']} to {each['to']}",
            str(each["count"]),
            *(f"{each[key]:.3f}" for key in ("accuracy", "longer_wins_accuracy")),
        )
    console.print(groups)
    length = report["length"]
    _lines(
        [
            f"calibration error {report['calibration']['error']:.3f}, loss {report['loss']:.3f}, "
            f"equal scores {report['equal_scores']}",
            f"score and length: Pearson {_number(length['score_pearson'])}, Spearman "
            f"{_number(length['score_spearman'])}; the longer answer gets the higher score in "
            f"{_number(length['prefers_longer'])} of pairs",
            f"{report['data']}; {report['rows']}",
        ]
    )


def show_perplexity(report: dict[str, Any]) -> None:
    """One row."""
    table = Table("model", "perplexity", "nll", "tokens", "windows")
    table.add_row(
        report["model"],
        f"{report['perplexity']:.4g}",
        f"{report['nll']:.4f}",
        str(report["tokens"]),
        str(report["windows"]),
    )
    console.print(table)
    if report["counted"] == "text":
        how = (
            f"windows of {report['window']} tokens, {report['overlap']} of them seen before; every "
            "token counts once"
        )
    else:
        how = f"the answers and their ends count; {report['rows']}"
    _lines([report["data"], how])


def _notes(report: dict[str, Any]) -> None:
    lost = [f"{count} left out ({reason})" for reason, count in report["left_out"].items()]
    _lines([", ".join([report["prompts"], *lost]), *(f"note: {note}" for note in report["notes"])])


def _lines(lines: list[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
