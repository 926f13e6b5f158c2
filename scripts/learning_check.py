"""Whether the quickstart learns: whole runs of the default recipe, as a table for docs/log.md.

    python scripts/learning_check.py 0 1 2
    python scripts/learning_check.py 0 --out runs/check --flags --ppo.kl-coef=0.05

Every seed runs all three stages. From what the first seed leaves in sft/ and reward/, PPO runs
again with several epochs, and with several generated batches, in an iteration. Runs that are
there already are read, not repeated.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_jax.runtime.metrics import read_rows

VARIANTS = ("--ppo.ppo-epochs=4", "--ppo.generation-batches=2")
HEADER = (
    "run",
    "right, T=1",
    "right, greedy",
    "reward accuracy",
    "KL",
    "max mean abs log ratio",
    "seconds",
)


@dataclass(frozen=True)
class Run:
    """One call of the trainer. `reward_accuracy` is that of the run whose reward model it used."""

    name: str
    directory: Path
    flags: tuple[str, ...]

    def finish(self) -> None:
        """Trains, unless the summary says that it was done; the exit code must be 0."""
        if "ppo" in self.summary():
            return
        began = time.perf_counter()
        command = [sys.executable, "-m", "rlhf_jax.train", f"--output-dir={self.directory}"]
        subprocess.run([*command, "--overwrite-output-dir", *self.flags], check=True)
        seconds = time.perf_counter() - began
        (self.directory / "seconds.txt").write_text(f"{seconds:.0f}\n", encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        """Results by stage."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def row(self, base: "Run") -> list[str]:
        """The cells of its line in the table."""
        ppo = self.summary()["ppo"]
        before, after = ppo["before"], ppo["after"]
        shares = [
            f"{before['judged'][how]['all']['right']:.3f} -> "
            f"{after['judged'][how]['all']['right']:.3f}"
            for how in ("sampled", "greedy")
        ]
        rows = read_rows(self.directory / "metrics.jsonl")
        shifts = [row["policy/abs_log_ratio"] for row in rows if "policy/abs_log_ratio" in row]
        return [
            self.name,
            *shares,
            f"{base.summary()['reward']['eval/accuracy']:.3f}",
            f"{after['eval/objective/kl']:.2f}",
            f"{max(shifts):.3f}",
            (self.directory / "seconds.txt").read_text(encoding="utf-8").strip(),
        ]


def plan(seeds: list[int], out: Path, flags: list[str]) -> list[tuple[Run, Run]]:
    """(run, the run whose reward model it uses): every seed, then the variants of the first."""
    runs = []
    for seed in seeds:
        whole = Run(f"seed {seed}", out / f"seed{seed}", (f"--seed={seed}", *flags))
        runs.append((whole, whole))
    first = runs[0][0]
    start = (
        "--recipe=quickstart", "--step", "3", f"--seed={seeds[0]}",
        f"--actor-model={first.directory / 'sft'}", f"--reward-model={first.directory / 'reward'}",
    )  # fmt: skip
    for number, variant in enumerate(VARIANTS):
        name = f"seed {seeds[0]}, {variant}"
        directory = out / f"seed{seeds[0]}-variant{number}"
        runs.append((Run(name, directory, (*start, *flags, variant)), first))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether the quickstart learns.")
    parser.add_argument("seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/learning_check"))
    parser.add_argument("--no-variants", action="store_true")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for every run")
    args = parser.parse_args()
    runs = plan(args.seeds, args.out, args.flags)
    if args.no_variants:
        runs = runs[: len(args.seeds)]
    for run, _ in runs:
        run.finish()
    print()
    for cells in (HEADER, ["---"] * len(HEADER), *(run.row(base) for run, base in runs)):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
