"""Whether devices agree: a PPO step on every mesh that they allow, against the same on one device.

    python scripts/check_devices.py                            # OPT-125M shapes, bf16 and f32
    python scripts/check_devices.py --mesh 2x1 1x2 --dtype float32
    python scripts/check_devices.py --simulate 8 --tiny        # 8 devices of a CPU

Random weights, the same on every mesh. Each mesh generates with the same seed; then it scores and
trains on what one device has generated, through the functions of `stages/ppo.py`. Without `--mesh`
these are one device once more (what is not equal there is not due to devices), 2x1, 4x1, …, all
devices as Nx1, with tensor parallelism 2 and N, and from 4 devices on as two replicas. Meshes that
are named and those of all devices but the replicas are tried with every inference tensor
parallelism that fits them.

`tokens` is the share of answer tokens equal to those of one device. `numbers` is the largest
difference of a log-probability, value, advantage, return, score or metric x, divided by 1 + |x|,
and where it is. `gradients` are norms of the difference of all moments after the step, over their
norm. In float32 products are not rounded to TF32, and models with ReLU have GELU in its place:
where rounding turns the sign of a ReLU's input, another gradient passes, and the share of 1e-6 of
them makes a difference of 1e-3 in all. Exit code 1 where a limit is passed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import numpy as np

from meshes.layout import MeshShape, check_device_count, inference_sizes, parse_mesh
from meshes.multihost import check_platform, simulate_cpu_devices, start_processes, to_host
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.stages.checks import check_batches
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo import collect, means, update
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.run import Run
from scripts.bench_rlhf import Bench
from scripts.compile_ahead import compile_ahead
from scripts.iteration_flops import Setting
from scripts.random_rows import Replayed

DTypeName = Literal["float32", "bfloat16"]
DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)
COMPARED = ("ref_logprobs_BR", "values_BR", "advantages_BR", "returns_BR", "scores_B")


@dataclass(frozen=True)
class Limits:
    """The fewest tokens that must be equal, and by how much numbers and gradients may differ."""

    tokens: float
    numbers: float
    gradients: float


LIMITS: dict[DTypeName, Limits] = {
    "float32": Limits(tokens=1.0, numbers=1e-3, gradients=1e-3),
    "bfloat16": Limits(tokens=0.7, numbers=0.1, gradients=0.1),
}


@dataclass(frozen=True)
class Place:
    """A mesh, and how many devices share a model that decodes."""

    shape: MeshShape
    inference_tp: int


@dataclass(frozen=True)
class Outcome:
    """What a step made; NumPy."""

    rollout: Rollout
    numbers: dict[str, np.ndarray]
    moments: tuple[list[np.ndarray], list[np.ndarray]]


def one_step(setting: Setting, place: Place, dtype: DTypeName, answers: Rollout | None) -> Outcome:
    """A step from random weights, trained on `answers`, or on its own where there are none."""
    with tempfile.TemporaryDirectory() as directory:
        cfg = TrainConfig(step=(3,), output_dir=directory, dtype=dtype, ppo=setting.ppo)
        run = Run(cfg, place.shape, place.inference_tp)
        with jax.set_mesh(run.mesh):
            bench = Bench.create(run, setting)
            compile_ahead(bench, *bench.companions())
            prompts, key = bench.data.train.batch(0), run.key(0, "generate/0")
            made = bench.engine.generate(bench.roles.policy, prompts, setting.ppo.sampling, key=key)
            rollout = to_host(made)
            numbers, roles = train_on(bench, answers or rollout)
    states = roles.actor.opt_state, roles.critic.opt_state
    actor, critic = (
        [x for x in jax.tree.leaves(to_host(s)) if x.dtype.kind == "f"] for s in states
    )
    return Outcome(rollout, numbers, (actor, critic))


def train_on(bench: Bench, answers: Rollout) -> tuple[dict[str, np.ndarray], Any]:
    """Scores the answers and takes an optimizer step; the numbers of both, and the roles."""
    run, engine = bench.run, Replayed(bench.engine, answers)
    control, host = bench.companions()
    made, _, metrics = collect(
        run, bench.roles, control, engine, bench.programs, host, bench.data, 0
    )
    numbers = {name: getattr(made[0].experience, name) for name in COMPARED}
    roles, _, losses = update(run, bench.roles, None, engine, bench.programs, bench.data, made, 0)
    return to_host(numbers | metrics | means(losses)), roles


def places(num_devices: int) -> Iterator[Place]:
    """One device first, then 2x1, 4x1, …, and all of them in every way that is offered."""
    devices = 1
    while devices < num_devices:
        yield Place(MeshShape(1, devices, 1), devices)
        devices *= 2
    for tensor in sorted({1, 2, num_devices}):
        if num_devices % tensor == 0:
            yield from places_of(MeshShape(1, num_devices // tensor, tensor))
    if num_devices >= 4 and num_devices % 2 == 0:
        yield Place(MeshShape(2, num_devices // 2, 1), num_devices // 2)


def places_of(shape: MeshShape) -> Iterator[Place]:
    """A mesh with every inference tensor parallelism that fits it."""
    for size in inference_sizes(shape):
        yield Place(shape, size)


def equal_tokens(mine: Rollout, theirs: Rollout) -> float:
    """The share of answer tokens that are equal."""
    return float((mine.tokens_BR == theirs.tokens_BR).mean())


def largest_difference(
    mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> tuple[float, str]:
    """Of all numbers, over 1 and their size; and whose it is. Infinite where one is not finite."""
    found = {}
    for name, reference in theirs.items():
        difference = np.abs(mine[name] - reference) / (1 + np.abs(reference))
        found[name] = float(np.nan_to_num(difference, nan=np.inf).max())
    name = max(found, key=lambda each: found[each])
    return found[name], name


def relative_norm(mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The norm of the difference of all arrays, over that of all arrays."""
    squares = [
        (np.square(np.float64(a) - b).sum(), np.square(np.float64(b)).sum())
        for a, b in zip(mine, theirs, strict=True)
    ]
    above, below = np.sum(squares, axis=0)
    return float(np.sqrt(above / below))


def compare(outcome: Outcome, reference: Outcome, limits: Limits) -> tuple[bool, str]:
    """Whether they agree, and the cells of a line."""
    tokens = equal_tokens(outcome.rollout, reference.rollout)
    numbers, name = largest_difference(outcome.numbers, reference.numbers)
    gradients = [
        relative_norm(a, b) for a, b in zip(outcome.moments, reference.moments, strict=True)
    ]
    agrees = (
        tokens >= limits.tokens and numbers <= limits.numbers and max(gradients) <= limits.gradients
    )
    cells = f"{tokens:.3f} | {numbers:.1e} {name} | {gradients[0]:.1e}, {gradients[1]:.1e}"
    return agrees, f"{cells} | {'yes' if agrees else 'NO'}"


HEADER = (
    "| dtype | mesh | inference TP | tokens | numbers | gradients (actor, critic) | agrees | s |\n"
    + "|---" * 8
    + "|"
)


def check(setting: Setting, dtype: DTypeName, found: Sequence[Place]) -> bool:
    """Prints a line for each mesh; whether all agree with one device."""
    if dtype == "float32":
        setting = replace(setting, actor=smooth(setting.actor), critic=smooth(setting.critic))
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        reference = one_step(setting, Place(MeshShape(1, 1, 1), 1), dtype, None)
        passed = True
        for place in found:
            began = time.perf_counter()
            outcome = one_step(setting, place, dtype, reference.rollout)
            agrees, cells = compare(outcome, reference, LIMITS[dtype])
            seconds = time.perf_counter() - began
            where = f"| {dtype} | {place.shape} | {place.inference_tp} "
            print(f"{where}| {cells} | {seconds:.0f} |", flush=True)
            passed = passed and agrees
    return passed


def smooth(cfg: ModelConfig) -> ModelConfig:
    """The model with a gradient that rounding changes little."""
    return replace(cfg, activation="gelu") if cfg.activation == "relu" else cfg


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one PPO step on every mesh against one device")
    parser.add_argument("--mesh", nargs="+", help="some of the meshes; without: all")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--model", default="facebook/opt-125m", choices=list(SIZES), help="all four models' shapes"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--simulate", type=int, help="devices that a CPU simulates")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    return parser.parse_args()


def setting_of(args: argparse.Namespace) -> Setting:
    """The sizes of a step."""
    cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[args.model]
    cfg = replace(cfg, eos_token_id=None, num_layers=args.layers or cfg.num_layers)
    ppo = PPOConfig(
        batch_size=args.batch,
        max_prompt_seq_len=16 if args.tiny else args.prompt,
        max_answer_seq_len=16 if args.tiny else args.answer,
        standardize_score=False,
        remat="full",
    )
    return Setting(cfg, cfg, ppo)


def wanted_places(meshes: Sequence[str] | None, setting: Setting) -> list[Place]:
    """The meshes that were named, or those that the devices allow; ValueError where one does not
    fit, before any is tried.
    """
    devices = jax.device_count()
    if devices == 1:
        raise ValueError(
            "1 device is visible, there is no other to agree with it: use --simulate 8 --tiny for "
            "devices of the CPU"
        )
    if meshes is None:
        found = list(places(devices))
    else:
        found = [place for mesh in meshes for place in places_of(parse_mesh(mesh))]
    for place in found:
        check_device_count(place.shape, devices)
        check_batches(TrainConfig(step=(3,), ppo=setting.ppo), place.shape)
    return found


def main() -> int:
    args = arguments()
    if args.simulate is not None:
        simulate_cpu_devices(args.simulate)
    keep_compiled_programs()
    start_processes()
    setting = setting_of(args)
    try:
        check_platform()
        found = wanted_places(args.mesh, setting)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, {setting.actor.num_layers} layers "
        f"of {setting.actor.width}, {args.batch} rows"
    )
    print(HEADER, flush=True)
    passed = [check(setting, dtype, found) for dtype in args.dtype]
    print("all agree" if all(passed) else "some differ")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
