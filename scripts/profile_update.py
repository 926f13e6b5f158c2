"""How much of an update's collectives hides behind computation, on several GPUs: one command.

    python scripts/profile_update.py                  # OPT-1.3B, all GPUs, 32 rows of each
    python scripts/profile_update.py --layers 8 --options default combine-128m O1
    python scripts/profile_update.py --option xla_gpu_all_gather_combine_threshold_bytes=1

PPO's update of an OPT actor and its critic (one optimizer step on random answers) under each set of
compiler options. `step` is timed without the profiler; the other columns are means of the devices
over an update in a trace of `--repeats` of them. A collective is exposed where no other kernel of
its device runs, and `hidden` is the rest of its time. Waiting for a slower device counts as
exposed: the device with most hidden says what the program allows. `rest` is what no kernel fills:
under the profiler the host launches kernels one by one.

`--simulate 8 --tiny` compiles and times on CPU devices, whose traces hold no kernels.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshes.layout import default_inference_tp
from meshes.multihost import start_devices
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo import collect, update
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.run import Run
from scripts.bench_rlhf import Bench
from scripts.bench_step import compiler_option
from scripts.iteration_flops import Setting
from scripts.random_rows import Replayed, random_answers
from scripts.trace_overlap import NS_PER_MS, DeviceTimes, Kernel, device_times, read_trace

MIB = 2**20


def combined(num_bytes: int) -> dict[str, Any]:
    """Gathers and scatters are merged until they have so many bytes."""
    kinds = ("all_gather", "reduce_scatter")
    return {f"xla_gpu_{kind}_combine_threshold_bytes": num_bytes for kind in kinds}


OPTION_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "in-order": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "combine-8m": combined(8 * MIB),
    "combine-128m": combined(128 * MIB),
    "fixed-costs": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_analytical_sol_latency_estimator": False,
    },
    "two-at-once": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    "O1": {"optimization_level": "O1"},
}
"""What is worth trying. XLA merges collectives up to 30 MiB by default, and runs one at a time."""


class WithOptions:
    """A jitted function, compiled once with options."""

    def __init__(self, jitted: Any, options: dict[str, Any]) -> None:
        self.jitted, self.options = jitted, options
        self.program: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.program is None:
            self.program = self.jitted.lower(*args, **kwargs).compile(self.options or None)
        return self.program(*args, **kwargs)


@dataclass
class Update:
    """The update of a bench, again and again on one experience; the models move on."""

    bench: Bench
    experiences: Any

    @classmethod
    def create(cls, run: Run, setting: Setting) -> "Update":
        bench = Bench.create(run, setting)
        engine = Replayed(bench.engine, random_answers(setting))
        control, host = bench.companions()
        made = collect(run, bench.roles, control, engine, bench.programs, host, bench.data, 0)
        return cls(bench, made[0])

    def __call__(self, program: Any) -> None:
        """One update, waited for."""
        bench, programs = self.bench, replace(self.bench.programs, update=program)
        bench.roles, _, losses = update(
            bench.run, bench.roles, None, bench.engine, programs, bench.data, self.experiences, 0
        )
        jax.block_until_ready((bench.roles.actor, bench.roles.critic, losses))


def step_ms(step: Update, program: WithOptions, repeats: int) -> float:
    """Median wall-clock time of an update."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step(program)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def traced(step: Update, program: WithOptions, repeats: int) -> Mapping[int, list[Kernel]]:
    """The kernels of some updates, by device."""
    with tempfile.TemporaryDirectory() as directory:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(repeats):
                step(program)
        return read_trace(Path(directory))


def mean_times(devices: Sequence[DeviceTimes], repeats: int) -> list[float]:
    """Wall, computation, collectives, exposed, rest: a mean update of a mean device."""
    count = len(devices) * repeats
    names = ("wall", "compute", "collective", "exposed", "idle")
    return [sum(getattr(each, name) for each in devices) / count for name in names]


def print_set(name: str, step: Update, args: argparse.Namespace) -> None:
    """A line, and the collectives that are exposed longest."""
    program = WithOptions(step.bench.programs.update, args.sets[name])
    began = time.perf_counter()
    step(program)
    compiled = time.perf_counter() - began
    alone = step_ms(step, program, args.repeats)
    memory = program.program.memory_analysis()
    ends = f"{memory.temp_size_in_bytes / 1e9:.1f} | {compiled:.0f} |"
    if jax.default_backend() != "gpu":
        print(f"| {name} | {alone:.1f} | no GPU, no trace | - | - | - | - | - | {ends}", flush=True)
        return
    kernels = traced(step, program, args.repeats)
    devices = [device_times(each) for each in kernels.values()]
    wall, compute, collective, exposed, idle = mean_times(devices, args.repeats)
    hidden = 1 - exposed / collective if collective else 1.0
    cells = [f"{ms:.1f}" for ms in (alone, wall, compute, collective, exposed)]
    print(f"| {name} | {' | '.join(cells)} | {hidden:.0%} | {idle:.1f} | {ends}", flush=True)
    each = ", ".join(f"{device.hidden:.0%}" for device in devices)
    print(f"    hidden by device: {each}")
    print_longest(devices[0], kernels[min(kernels)], args.repeats)


def print_longest(device: DeviceTimes, kernels: Sequence[Kernel], repeats: int) -> None:
    """Of one device: collectives by exposed time, and the other kernels by time."""
    for each in device.by_name[:4]:
        count, alone, total = each.count / repeats, each.alone / repeats, each.total / repeats
        print(f"    {each.name}: {count:.0f} in {total:.2f} ms, {alone:.2f} exposed")
    longest: Counter[str] = Counter()
    for kernel in kernels:
        if not kernel.is_collective:
            longest[kernel.name[:40]] += int(kernel.end - kernel.start)
    others = (f"{name} {ns / NS_PER_MS / repeats:.1f}" for name, ns in longest.most_common(4))
    print(f"    other kernels, ms: {', '.join(others)}", flush=True)


HEADER = (
    "| options | step ms | traced ms | compute ms | collectives ms | exposed ms | hidden | rest ms "
    "| temporary GB | first s |\n" + "|---" * 10 + "|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="collectives hidden in PPO's update")
    parser.add_argument("--actor", default="facebook/opt-1.3b")
    parser.add_argument("--critic", default="facebook/opt-350m")
    parser.add_argument("--layers", type=int, help="fewer layers than the models have")
    parser.add_argument("--rows", type=int, default=32, help="of a device")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--mesh", help="FxT; without: all devices")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--options", nargs="+", default=list(OPTION_SETS), choices=OPTION_SETS)
    parser.add_argument(
        "--option", nargs="+", default=[], type=compiler_option, metavar="NAME=VALUE",
        help="one more set, made of these",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulate", type=int, help="devices that a CPU simulates")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.prompt, args.answer = 16, 16
        args.actor = args.critic = "the built-in model"
    args.sets = {name: OPTION_SETS[name] for name in args.options}
    args.sets |= {"given": dict(args.option)} if args.option else {}
    return args


def setting_of(args: argparse.Namespace, devices: int) -> Setting:
    """What is updated."""
    tiny = quickstart_config(264, 257, 258, 256)
    models = (tiny, tiny) if args.tiny else (SIZES[args.actor], SIZES[args.critic])
    actor, critic = (
        replace(cfg, eos_token_id=None, num_layers=min(args.layers or 1000, cfg.num_layers))
        for cfg in models
    )
    ppo = PPOConfig(
        batch_size=args.rows * devices,
        max_prompt_seq_len=args.prompt,
        max_answer_seq_len=args.answer,
        standardize_score=False,
        remat=args.remat,
    )
    return Setting(actor, critic, ppo)


def main() -> None:
    args = arguments()
    keep_compiled_programs()
    shape = start_devices(args.mesh, cpu_devices=args.simulate or 1)
    setting = setting_of(args, shape.num_devices)
    print(
        f"{shape.num_devices} x {jax.devices()[0].device_kind}, mesh {shape}, {args.actor} and "
        f"{args.critic}, {setting.actor.num_layers} layers, {args.rows} rows a device of "
        f"{setting.length} tokens, bf16, remat {args.remat}"
    )
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        cfg = TrainConfig(step=(3,), output_dir=directory, ppo=setting.ppo)
        heads = setting.actor.num_heads, setting.actor.num_kv_heads
        run = Run(cfg, shape, default_inference_tp(shape, *heads))
        with jax.set_mesh(run.mesh):
            step = Update.create(run, setting)
            for name in args.sets:
                try:
                    print_set(name, step, args)
                except jax.errors.JaxRuntimeError as error:
                    print(f"| {name} | failed: {str(error).splitlines()[0][:160]} |", flush=True)


if __name__ == "__main__":
    main()
