"""Whether one process for each GPU trains as one process with all of them; and one that is killed.

    python scripts/check_processes.py                      # all GPUs
    python scripts/check_processes.py --simulate 2         # two processes, each 2 devices of a CPU

Small runs of the quickstart in float32, at the same time: all three steps by one process and by one
process a GPU (`scripts/train_processes.py`), whose metrics must agree; and step 1 by one process a
GPU, of which the last one is killed after a checkpoint: all must end at once, and go on with
`--resume` to the losses of the run that nothing happened to. Exit code 1 where something differs.
The runs share the GPUs, so none of them takes their memory in advance. Products are not rounded to
TF32, whose rounding training makes large within ten steps.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from rlhf_jax.runtime.metrics import read_rows
from scripts import train_processes

ENDS_WITHIN = 60
"""Seconds that all processes may take to end after one was killed."""
RTOL, ATOL = 1e-3, 1e-4
CLOCK = ("time", "timing_s/", "perf/")
COMMON = (
    "--log-interval=1", "--eval-batches=1", "--data.max-rows=128", "--sft.num-warmup-steps=0",
    "--sft.batch-size=16", "--reward.batch-size=16", "--ppo.batch-size=16", "--ppo.max-steps=3",
    "--reward.max-steps=4", "--reward.num-warmup-steps=0", "--ppo.num-eval-prompts=16",
)  # fmt: skip
SHORT, LONG = 8, 24
"""Optimizer steps of step 1: in the runs of all steps, and in the one that is killed."""


RUNNING: list[subprocess.Popen[bytes]] = []
"""All commands started so far."""


def started(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A command that `stop_all` ends."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    RUNNING.append(process)
    return process


def stop_all(signum: int, frame: object) -> None:
    """Ends what is running, and this program."""
    del frame
    for process in RUNNING:
        process.terminate()
    os._exit(128 + signum)


@dataclass(frozen=True)
class Jobs:
    """The commands of this host."""

    directory: Path
    devices: int
    processes: int
    simulate: int | None

    def flags(self, name: str, *more: str) -> list[str]:
        return [
            "--recipe=quickstart", f"--mesh={self.devices}x1", *COMMON,
            f"--output-dir={self.directory / name}", *more,
        ]  # fmt: skip

    def one(self, name: str, *more: str) -> list[str]:
        """One process with all devices."""
        return [sys.executable, "-m", "rlhf_jax.train", *self.flags(name, *more)]

    def several(self, name: str, *more: str) -> list[str]:
        """One process a GPU."""
        each = [f"--processes={self.processes}"]
        each += [] if self.simulate is None else [f"--simulate={self.simulate}"]
        return [
            sys.executable, train_processes.__file__, *each, "--",
            *self.flags(name, *more),
        ]  # fmt: skip

    def run(self, command: Sequence[str], name: str) -> float:
        """Seconds of a command that must end well; its output lies beside the runs."""
        began = time.perf_counter()
        with (self.directory / f"{name}.txt").open("ab") as output:
            process = started(command, output)
        if code := process.wait():
            raise RuntimeError(f"{name} ended with {code}: {self.said(name)[-800:]}")
        return time.perf_counter() - began

    def said(self, name: str) -> str:
        """What a command has printed so far."""
        return (self.directory / f"{name}.txt").read_text(errors="replace").strip()

    def losses(self, name: str) -> dict[tuple[str, int, str], float]:
        """Every number of metrics.jsonl but the clock's."""
        return {
            (row["stage"], row["step"], metric): value
            for row in read_rows(self.directory / name / "metrics.jsonl")
            for metric, value in row.items()
            if metric not in ("stage", "step") and not metric.startswith(CLOCK)
        }


def killed(jobs: Jobs, *flags: str) -> tuple[float, str]:
    """Kills the last process after its first checkpoint; how long the others then took to end, and
    what was said.
    """
    name = "killed"
    with (jobs.directory / f"{name}.txt").open("wb") as output:
        command = jobs.several(name, "--save-interval=2", *flags)
        parent = started(command, output)
        try:
            wait_for_checkpoint(jobs.directory / name / "checkpoints" / "sft", parent)
            pids = re.search(r"\d+ processes: ([\d, ]+)", jobs.said(name))
            assert pids is not None, "train_processes.py says whom it has started"
            os.kill(int(pids[1].split(", ")[-1]), signal.SIGKILL)
            began = time.perf_counter()
            code = parent.wait(timeout=ENDS_WITHIN)
        finally:
            parent.terminate()
    if code != 128 + signal.SIGKILL:
        raise RuntimeError(
            f"exit code {code}, not that of a killed process: {jobs.said(name)[-800:]}"
        )
    return time.perf_counter() - began, jobs.said(name).splitlines()[-1]


def wait_for_checkpoint(directory: Path, process: subprocess.Popen[bytes]) -> None:
    """Until one is complete, before the run ends."""
    while process.poll() is None:
        if directory.is_dir() and any(each.name.isdigit() for each in directory.iterdir()):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the run ended before a checkpoint was in {directory}")


def differences(
    mine: dict[tuple[str, int, str], float], theirs: dict[tuple[str, int, str], float]
) -> list[str]:
    """What differs by more than rounding, and what only one of them has."""
    found = [f"{key}: only in one" for key in mine.keys() ^ theirs.keys()]
    for key in mine.keys() & theirs.keys():
        if not np.isclose(mine[key], theirs[key], rtol=RTOL, atol=ATOL, equal_nan=True):
            found.append(f"{key}: {mine[key]:.6g}, not {theirs[key]:.6g}")
    return sorted(found)


def report(what: str, jobs: Jobs, name: str, reference: str) -> bool:
    """Says whether two runs agree."""
    mine, theirs = jobs.losses(name), jobs.losses(reference)
    wrong = differences(mine, theirs)
    worst = max((abs(mine[k] - theirs[k]) for k in mine.keys() & theirs.keys()), default=0.0)
    verdict = "equal" if not wrong and mine else "DIFFERENT"
    print(f"{what}: {len(mine)} numbers {verdict}, largest difference {worst:.1e}", flush=True)
    for line in wrong[:10]:
        print(f"    {line}")
    return verdict == "equal"


def check(jobs: Jobs) -> bool:
    """Runs them all; whether all is as it should be."""
    short = f"--sft.max-steps={SHORT}"
    long = (f"--sft.max-steps={LONG}", "--step=1")
    with ThreadPoolExecutor() as pool:
        one = pool.submit(jobs.run, jobs.one("one", short), "one")
        several = pool.submit(jobs.run, jobs.several("several", short), "several")
        whole = pool.submit(jobs.run, jobs.one("whole", *long), "whole")
        stopped = pool.submit(partial(killed, jobs), *long)
        seconds, said = stopped.result()
        print(f"killed: all ended {seconds:.1f} s later; {said}", flush=True)
        more = ("--save-interval=2", "--resume", *long)
        jobs.run(jobs.several("killed", *more), "killed")
        times = f"{one.result():.0f} s by one process, {several.result():.0f} s by several"
        whole.result()
    print(f"all three steps: {times}", flush=True)
    same = report(f"{jobs.processes} processes against one", jobs, "several", "one")
    return report("killed and resumed against undisturbed", jobs, "killed", "whole") and same


def main() -> int:
    parser = argparse.ArgumentParser(description="processes against one process")
    parser.add_argument("--simulate", type=int, help="CPU devices of each of two processes")
    args = parser.parse_args()
    count = 2 if args.simulate is not None else len(train_processes.visible_gpus())
    if count < 2:
        raise SystemExit(
            f"processes are compared on at least 2 GPUs, visible are {count}: use --simulate 2 for "
            "devices of the CPU"
        )
    if args.simulate is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    signal.signal(signal.SIGTERM, stop_all)
    with tempfile.TemporaryDirectory() as directory:
        passed = check(Jobs(Path(directory), count * (args.simulate or 1), count, args.simulate))
    print("all agree" if passed else "some differ")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
