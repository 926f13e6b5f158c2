"""The table at the end of a run: what each stage reached, and what PPO or DPO changed."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from rlhf_jax.runtime.log import console, say
from rlhf_jax.runtime.report.verdict import of
from rlhf_jax.stages.run import read_summary

VERDICTS = ("right", "wrong", "unhelpful")
AVERAGED = ("objective/scores", "objective/kl", "sampled_right", "greedy_right")
"""What is said of the moving average beside the last weights."""
EXPORTS = {
    "sft": "after step 1",
    "reward": "reward model",
    "actor": "after PPO",
    "actor_ema": "after PPO, the moving average",
    "critic": "critic of PPO",
    "dpo": "after DPO",
}


def print_summary(directory: Path, seconds: float) -> None:
    """Prints results by stage, where the files are, and a command to try the model."""
    summary = read_summary(directory)
    if "sft" in summary and "eval/perplexity" in summary["sft"]:
        shown = number(summary["sft"]["eval/perplexity"])
        say(f"sft      held-out perplexity {shown}{of(summary['sft'], 'rows')}")
    if "reward" in summary and "eval/accuracy" in summary["reward"]:
        shown = number(summary["reward"]["eval/accuracy"])
        say(f"reward   held-out accuracy {shown}{of(summary['reward'], 'pairs')}")
    dpo = summary.get("dpo", {})
    if "eval/rewards/accuracies" in dpo:
        shown = number(dpo["eval/rewards/accuracies"])
        say(f"dpo      held-out accuracy {shown}{of(dpo, 'pairs')}")
    if dpo.get("before"):
        print_shares("DPO", dpo["before"], dpo["after"])
    ppo = summary.get("ppo", {})
    if ppo.get("before"):
        print_ppo(ppo["before"], ppo["after"])
    say(f"finished in {seconds:.0f} s; everything is in {directory}/")
    for name, what in EXPORTS.items():
        if (directory / name).exists():
            say(f"  {directory / name}/  {what}, a Hugging Face directory")
    for adapter in sorted(directory.glob("*_adapter")):
        say(f"  {adapter}/  adapters alone, a PEFT directory")
    say(f"  {directory / 'report.html'}  open it in a browser")
    samples = f"{directory / 'samples'}/, " if (directory / "samples").is_dir() else ""
    say(f"  {directory / 'metrics.jsonl'}, {samples}{directory / 'config.yaml'}")
    if any((directory / name).exists() for name in ("actor", "dpo", "sft")):
        runner = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""
        say(f"try it: {runner}python -m rlhf_jax.chat {shlex.quote(str(directory))}")


def print_ppo(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Reward, KL and length before and after PPO, and where the truth is known, the shares."""
    for name in ("objective/scores", "objective/kl", "response_length/mean"):
        then, now = before[f"eval/{name}"], after[f"eval/{name}"]
        say(f"ppo      held-out {name}: {number(then)} -> {number(now)}")
    print_shares("PPO", before, after)
    for name in AVERAGED:
        if f"eval/ema_{name}" in after:
            last, average = after[f"eval/{name}"], after[f"eval/ema_{name}"]
            say(f"ppo      moving average, {name}: {number(average)} (last: {number(last)})")


def print_shares(stage: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Tables of the shares and a sentence, where the truth is known."""
    if "judged" not in before:
        return
    for how in ("sampled", "greedy"):
        console.print(shares_table(stage, how, before["judged"][how], after["judged"][how]))
    say(sentence(stage, before["judged"], after["judged"]))


def number(value: float | None) -> str:
    """Three decimals; the summary holds null for what was not finite."""
    return "not finite" if value is None else f"{value:.3f}"


def shares_table(
    stage: str, how: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    """Right, wrong and unhelpful answers in percent, by task, after SFT and after `stage`."""
    title = "sampled at temperature 1" if how == "sampled" else "greedy"
    table = Table(title=f"held-out answers in %, {title}: after SFT -> after {stage}")
    table.add_column("task")
    for verdict in VERDICTS:
        table.add_column(verdict, justify="right")
    for task in sorted(before, key=lambda task: (task == "all", task)):
        cells = [f"{100 * before[task][v]:.1f} -> {100 * after[task][v]:.1f}" for v in VERDICTS]
        table.add_row(task, *cells, end_section=task != "all" and task == sorted(before)[-1])
    return table


def sentence(stage: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What `stage` changed, in a sentence."""
    points = {
        (how, verdict): 100 * (after[how]["all"][verdict] - before[how]["all"][verdict])
        for how in ("sampled", "greedy")
        for verdict in VERDICTS
    }
    return (
        f"{stage} changed the share of right answers by {points['sampled', 'right']:+.1f} points "
        f"sampled at temperature 1 and by {points['greedy', 'right']:+.1f} greedily; unhelpful "
        f"ones by {points['sampled', 'unhelpful']:+.1f} and wrong ones by "
        f"{points['sampled', 'wrong']:+.1f} points (sampled)."
    )
