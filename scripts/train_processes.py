"""`python -m rlhf_jax.train` as one process for each GPU of this host.

    python scripts/train_processes.py -- --recipe quickstart --mesh 2x1      # all GPUs
    python scripts/train_processes.py --gpus 0 1 -- --config run.yaml
    python scripts/train_processes.py --processes 2 --simulate 4 -- --mesh 8x1    # a CPU's devices

Behind `--` stand the flags of training, the same for every process. The first process prints; all
of them meet at a free port of the loopback. When one ends otherwise than with 0, the others are
ended too (they would wait for it), what happened is printed, and the exit code is its own. Ctrl-C
and SIGTERM reach every process once: they save and stop together; a second one stops them at once.
A terminal that is closed ends them all; on Linux so does SIGKILL.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRACE = 3.0
"""Seconds between asking a process to end and ending it."""
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""The exit codes of training that a signal has stopped."""
PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that a process gets when its parent has ended."""


@dataclass(frozen=True)
class Job:
    """Which processes there are: one for each entry of `gpus`, or `count` with CPU devices."""

    count: int
    gpus: Sequence[str] | None
    simulate: int | None

    def environment(self, index: int, address: str) -> dict[str, str]:
        """Of one process, beside what is inherited."""
        named = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX would listen to every network
            "JAX_NUM_PROCESSES": str(self.count),
            "JAX_PROCESS_ID": str(index),
        }
        if self.gpus is not None:
            return named | {"CUDA_VISIBLE_DEVICES": self.gpus[index]}
        return named | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.simulate)}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(n) for n in range(count)]


def free_address() -> str:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def killed_with_parent() -> Callable[[], None] | None:
    """What a child must call so that no way in which this process ends leaves it behind."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)

    return ask


def start(job: Job, flags: Sequence[str], processes: list[subprocess.Popen[bytes]]) -> None:
    """Adds them to `processes`. Each has a session of its own: a terminal's ctrl-C reaches none by
    itself.
    """
    address, prepare = free_address(), killed_with_parent()
    for index in range(job.count):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_jax.train", *flags],
            env={**os.environ, **job.environment(index, address)},
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509  (unsafe beside threads: there are none)
        )
        processes.append(process)


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 when all have ended well; else the code of the first that did not, the others ended.

    Where several have, one that was killed is the cause: the others have lost it.
    """
    while True:
        codes = [process.poll() for process in processes]
        failed = {index: code for index, code in enumerate(codes) if code}
        if failed:
            index, code = min(failed.items(), key=lambda each: each[1] != -signal.SIGKILL)
            end(processes)
            if code not in STOPPED:  # the first process has said how to go on
                print(f"error: {reason(index, code)}; the others were ended", file=sys.stderr)
            return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def reason(index: int, code: int) -> str:
    """How a process ended; the first one has said why."""
    if code < 0:
        return (
            f"process {index} was killed ({signal.Signals(-code).name}): go on from the last "
            "checkpoint with the same command and --resume"
        )
    return f"process {index} ended with exit code {code}"


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Processes that stop together have the time to; the rest are terminated, then killed: training
    saves after SIGTERM, for which it waits for the other processes.
    """
    for ask in (None, signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if ask is not None and process.poll() is None:
                process.send_signal(ask)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.05)


def arguments() -> tuple[Job, list[str]]:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description="training as one process for each GPU", epilog="flags of training follow --"
    )
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--gpus", nargs="+", help="as CUDA_VISIBLE_DEVICES names them")
    devices.add_argument("--simulate", type=int, help="CPU devices of each process")
    parser.add_argument("--processes", type=int, help="how many; without: one for each GPU")
    args = parser.parse_args(argv[:cut])
    for name in ("processes", "simulate"):
        if (given := getattr(args, name)) is not None and given < 1:
            parser.error(f"--{name}={given}: at least 1")
    if args.simulate is not None:
        return Job(args.processes or 2, None, args.simulate), argv[cut + 1 :]
    return gpu_job(args.gpus, args.processes), argv[cut + 1 :]


def gpu_job(asked: Sequence[str] | None, count: int | None) -> Job:
    """One process for each GPU that was asked for, or the first `count` of them."""
    visible = visible_gpus()
    # A GPU that is not there would be a CPU to JAX. Other names than numbers are not compared.
    missing = [gpu for gpu in ",".join(asked or ()).split(",") if gpu.isdigit()]
    missing = [gpu for gpu in missing if gpu not in visible]
    if visible and missing and visible[0].isdigit():
        raise SystemExit(f"no GPU {', '.join(missing)}: visible are {', '.join(visible)}")
    gpus = asked or visible
    if not gpus:
        raise SystemExit("no GPU is visible: use --simulate 4 for devices of the CPU")
    if count is not None and count > len(gpus):
        raise SystemExit(
            f"{count} processes need as many GPUs, {len(gpus)} are visible: use --processes "
            f"{len(gpus)}, or --simulate for devices of the CPU"
        )
    return Job(count or len(gpus), gpus[:count], None)


def main() -> int:
    job, flags = arguments()
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: object) -> None:
        del frame
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    def give_up(signum: int, frame: object) -> None:
        del frame
        for again in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # a second one leaves no process behind
        sys.exit(128 + signum)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, give_up)
    try:
        start(job, flags, processes)
        pids = ", ".join(str(process.pid) for process in processes)
        print(f"{job.count} processes: {pids}", file=sys.stderr, flush=True)
        return wait(processes)
    finally:
        end(processes)


if __name__ == "__main__":
    sys.exit(main())
