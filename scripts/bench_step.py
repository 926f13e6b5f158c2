"""Speed of a supervised train step, in model TFLOP/s: one command, one table.

    python scripts/bench_step.py                            # OPT-1.3B, every remat, 16 x 512
    python scripts/bench_step.py --remat dots full --batch 16 64 --length 512 2048
    python scripts/bench_step.py --model facebook/opt-6.7b --remat dots mlp --batch 16

Random weights and tokens, bf16 with float32 masters and AdamW. Model FLOPs are 6 N a token and the
causal half of attention, forward and backward; recomputation is not counted. `planned` is what the
memory plan says of state and temporary memory. `--phases` times the forward pass and the gradient
as programs of their own; what remains of a step is the optimizer. A variant that fails leaves its
reason in the table. Set XLA_CLIENT_MEM_FRACTION=0.95 for models that fill a device.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import MeshShape, make_mesh
from meshes.multihost import start_devices
from meshes.reshard import put_batch
from rlhf_jax.data.batches import TextBatch
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.engine.step import gradients, train_step
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import compute_layout, init_params, param_specs, store_layout
from rlhf_jax.models.remat import Remat
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, plan_stage
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss
from rlhf_jax.stages.supervised_config import SFTConfig

POLICIES: list[Remat] = [name for name in get_args(Remat) if name != "auto"]
HEADER = (
    "| remat | rows x length | parts | step ms | model TFLOP/s a device | forward ms | gradient ms "
    "| state GB | temporary GB | planned GB | compiled in s |\n" + "|---" * 11 + "|"
)


def model_flops(cfg: ModelConfig, rows: int, length: int) -> float:
    """6 N a token, and 6 T^2 D a layer and row for causal attention."""
    attention = 6 * length**2 * cfg.num_heads * cfg.head_size * cfg.num_layers
    return rows * (6 * cfg.num_params() * length + attention)


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    settings: SFTConfig

    def __str__(self) -> str:
        cfg = self.settings
        size = f"{cfg.batch_size} x {cfg.max_seq_len}"
        return f"| {cfg.remat} | {size} | {cfg.gradient_accumulation_steps} |"


@dataclass
class Bench:
    """A model on a mesh, and its state, which moves on from variant to variant."""

    cfg: ModelConfig
    shape: MeshShape
    mesh: Any
    repeats: int
    phases: bool
    options: dict[str, Any]
    state: TrainState | None = field(default=None)

    def __post_init__(self) -> None:
        self.layout = compute_layout(self.cfg, self.mesh)
        self.optimizer = make_optimizer(OptimizerConfig(1e-5), param_specs(self.cfg), 100)

    def current_state(self) -> TrainState:
        """The state; a new one at first, and where a failure has taken the last one with it."""
        leaves = jax.tree.leaves(self.state)
        if self.state is None or any(leaf.is_deleted() for leaf in leaves):
            self.state, leaves, cfg = None, [], self.cfg
            dtype = jnp.dtype(jnp.bfloat16)
            params = init_params(
                param_specs(cfg), store_layout(cfg, self.mesh), dtype, key=jax.random.key(0)
            )
            self.state = create_state(params, self.optimizer)
        return self.state

    def measure(self, variant: Variant) -> str:
        """The line of a variant."""
        settings, state = variant.settings, self.current_state()
        rows, length = settings.batch_size, settings.max_seq_len
        loss = partial(sft_batch_loss, cfg=settings, model=self.cfg, layout=self.layout)
        weight = partial(num_predictions, loss_on="all")
        parts = settings.gradient_accumulation_steps
        batch = self.batch(rows, length)
        step = jax.jit(
            partial(
                train_step, loss_fn=loss, weight_fn=weight, optimizer=self.optimizer,
                num_parts=parts,
            ),
            donate_argnums=0,
        )  # fmt: skip
        began = time.perf_counter()
        program = step.lower(state, batch).compile(self.options or None)
        compiled, memory = time.perf_counter() - began, program.memory_analysis()
        assert memory is not None
        seconds = self.step_seconds(program, batch)
        forward, gradient = "", ""
        if self.phases:
            assert self.state is not None
            params = self.state.params
            only = jax.jit(lambda p, b: loss(p, b)[0])
            both = jax.jit(lambda p, b: gradients(loss, p, b, weight, parts)[:2])
            forward, gradient = (
                f"{1e3 * self.seconds(partial(jit, params, batch)):.1f}" for jit in (only, both)
            )
        rate = model_flops(self.cfg, rows, length) / seconds / self.mesh.size
        sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, self.planned(settings)
        cells = [f"{1e3 * seconds:.1f}", f"{rate / 1e12:.0f}", forward or "-", gradient or "-"]
        cells += [f"{size / 1e9:.1f}" for size in sizes]
        return f"{variant} {' | '.join([*cells, f'{compiled:.0f}'])} |"

    def step_seconds(self, program: Any, batch: TextBatch) -> float:
        """Median seconds of a step; the state moves on."""
        metrics = {}

        def step() -> Any:
            nonlocal metrics
            self.state, metrics = program(self.state, batch)
            return metrics

        found = self.seconds(step)
        assert np.isfinite(float(metrics["loss"])), metrics
        return found

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median wall-clock time of a call; one before warms up."""
        times = []
        for _ in range(self.repeats + 1):
            began = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def batch(self, rows: int, length: int) -> TextBatch:
        """Random tokens, every row full."""
        shape = (rows, length)
        tokens = np.random.default_rng(0).integers(5, self.cfg.vocab_size, shape).astype(np.int32)
        full = np.full(rows, length, np.int32)
        ones = np.ones(rows)
        batch = TextBatch(tokens, full, ones.astype(np.int32), ones.astype(np.float32))
        return put_batch(batch, self.layout)

    def planned(self, settings: SFTConfig) -> int:
        """Bytes on a device during an update, by the memory plan."""
        place = Place(self.shape, None, jax.default_backend())
        cfg = TrainConfig(step=(1,), sft=settings)
        plan = plan_stage(cfg, "sft", Models(self.cfg), place)
        return plan.resident + plan.programs["update"]


def variants(args: argparse.Namespace) -> Iterator[Variant]:
    for length in args.length:
        for rows in args.batch:
            for remat in args.remat:
                settings = SFTConfig(
                    batch_size=rows, max_seq_len=length, remat=remat,
                    gradient_accumulation_steps=args.parts,
                )  # fmt: skip
                yield Variant(settings)


def compiler_option(text: str) -> tuple[str, Any]:
    """`name=value`, such as xla_gpu_enable_triton_gemm=false."""
    name, _, value = text.partition("=")
    words: dict[str, Any] = {"true": True, "false": False}
    return name, words.get(value, int(value) if value.isdigit() else value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="speed of a train step")
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--length", "--seq", type=int, nargs="+", default=[512])
    parser.add_argument("--parts", type=int, default=1, help="gradient accumulation")
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--remat", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--phases", action="store_true", help="forward pass and gradient too")
    parser.add_argument(
        "--compiler-option", nargs="+", default=[], type=compiler_option, metavar="NAME=VALUE"
    )
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.length, args.batch, args.model = [48], [16], "the built-in model"
    return args


def main() -> None:
    args = arguments()
    keep_compiled_programs()
    cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[args.model]
    shape = start_devices(args.mesh)
    mesh = make_mesh(shape, shape.tensor)
    options = dict(args.compiler_option)
    print(f"{jax.devices()[0].device_kind}, mesh {shape}, {args.model}, bf16 {options or ''}")
    print(HEADER, flush=True)
    bench = Bench(cfg, shape, mesh, args.repeats, args.phases, options)
    with jax.set_mesh(mesh):
        for variant in variants(args):
            try:
                print(bench.measure(variant), flush=True)
            except jax.errors.JaxRuntimeError as error:
                print(f"{variant} failed: {str(error).splitlines()[0][:200]} |", flush=True)


if __name__ == "__main__":
    main()
