"""What the change of layout from training to decoding costs: ms and GB/s of a device's link.

    python scripts/bench_relayout.py                          # OPT-1.3B to 30B, all GPUs
    python scripts/bench_relayout.py --model facebook/opt-13b --mesh 4x2
    python scripts/bench_relayout.py --simulate 8 --tiny      # CPU devices

The actor's weights (bf16) as training stores them, brought to where each inference tensor
parallelism that fits the mesh decodes: `HybridEngine.pin`, what a rollout does first. Where a model
shares its weights with as many devices as store it the layouts are one, nothing is moved, and the
line says so. GB/s are the bytes that a device must receive, over the time. Beside it stands the
rate of one all-gather of a large array in the same run: all devices get the whole of it.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshes.layout import Layout, MeshShape, inference_sizes, make_mesh
from meshes.multihost import start_devices
from meshes.reshard import whole
from meshes.spec import ParamSpec
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.memory import leaf_bytes, tree_bytes
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import is_spec, param_specs
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.stages.memory_plan import device_limit
from scripts.bench_rlhf import median_seconds

MODELS = [f"facebook/opt-{size}" for size in ("1.3b", "6.7b", "13b", "30b")]
ITEMSIZE = 2
FILL = 0.9
"""The share of a device that both copies may fill."""


def all_gather_rate(mesh: Mesh, num_bytes: int, repeats: int) -> float:
    """Bytes a second that a device receives while all of them get the whole of one array."""
    devices = mesh.size
    layout = Layout.create(mesh, "store", {"mlp": devices})
    shape = devices, num_bytes // devices // ITEMSIZE
    make = jax.jit(
        lambda: jnp.ones(shape, jnp.bfloat16), out_shardings=layout.sharding("mlp", None)
    )
    with jax.set_mesh(mesh):
        array = make()
        gather = jax.jit(whole)
        seconds = median_seconds(lambda: gather(array), repeats)
    return array.nbytes * (devices - 1) / devices / seconds


def made_up_weights(specs: Any, layout: Layout) -> Any:
    """Weights in `layout`; each number is what `made_up` says of its place."""
    return jax.tree.map(
        lambda spec: maker(spec.shape, layout.param_sharding(spec))(), specs, is_leaf=is_spec
    )


@functools.cache
def maker(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[], jax.Array]:
    """A program for all weights of one shape."""

    def make() -> jax.Array:
        places = [jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in range(len(shape))]
        return made_up(functools.reduce(jnp.add, places)).astype(jnp.bfloat16)

    return jax.jit(make, out_shardings=sharding)


def made_up(place: Any) -> Any:
    """A small number, exact in bfloat16, by row plus column."""
    return place & 127


def relayout(cfg: ModelConfig, shape: MeshShape, inference_tp: int, repeats: int) -> str:
    """The cells of a line."""
    engine = HybridEngine(cfg, make_mesh(shape, inference_tp), ())
    specs = param_specs(cfg)
    stored, decoding = (tree_bytes(specs, at, ITEMSIZE) for at in (engine.store, engine.rollout))
    sizes = f"{stored / 1e9:.3g} | {decoding / 1e9:.3g}"
    if same_layout(specs, engine):
        return f"{sizes} | 0 | the layouts are one | -"
    limit = device_limit()
    if limit is not None and stored + decoding > FILL * limit:
        return f"{sizes} | does not fit {limit / 1e9:.0f} | - | -"
    with jax.set_mesh(engine.mesh):
        params = made_up_weights(specs, engine.store)
    if not arrives(engine, params):
        return f"{sizes} | - | WRONG WEIGHTS | -"
    seconds = median_seconds(lambda: engine.pin(params), repeats)
    received = received_bytes(specs, engine)
    rate = received / seconds / 1e9
    return f"{sizes} | {received / 1e9:.3g} | {1e3 * seconds:.2f} | {rate:.3g}"


def received_bytes(specs: Any, engine: HybridEngine) -> int:
    """What a device lacks of what it decodes with: nothing of a weight that it stores whole."""

    def lacking(spec: ParamSpec) -> int:
        stored, decoding = (
            leaf_bytes(layout, spec, ITEMSIZE) for layout in (engine.store, engine.rollout)
        )
        return max(0, decoding - stored)

    return sum(map(lacking, jax.tree.leaves(specs, is_leaf=is_spec)))


def same_layout(specs: Any, engine: HybridEngine) -> bool:
    """Whether every weight decodes where it is stored."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return all(engine.store.spec(*s.axes) == engine.rollout.spec(*s.axes) for s in leaves)


def arrives(engine: HybridEngine, params: Any) -> bool:
    """Whether the first row of each shard is the one that belongs there."""
    matrix = engine.pin(params).embed_VW
    firsts = [(shard.index[0].start or 0, shard.data[0]) for shard in matrix.addressable_shards]
    columns = np.arange(matrix.shape[1])
    return all(
        np.array_equal(np.asarray(row, np.float32), made_up(first + columns))
        for first, row in firsts
    )


HEADER = (
    "| model | mesh | inference TP | stored GB a device | decoding GB | received GB | ms | GB/s |\n"
    + "|---" * 8
    + "|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time of the change of layout before a rollout")
    parser.add_argument("--model", nargs="+", default=MODELS, choices=list(SIZES))
    parser.add_argument("--mesh", help="FxT; without: all devices")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--gather-gb", type=float, default=4.0, help="the array that is gathered")
    parser.add_argument("--simulate", type=int, help="devices that a CPU simulates")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.gather_gb = ["the built-in model"], 0.01
    return args


def main() -> None:
    args = arguments()
    keep_compiled_programs()
    shape = start_devices(args.mesh, cpu_devices=args.simulate or 1)
    print(f"{shape.num_devices} x {jax.devices()[0].device_kind}, mesh {shape}, bf16")
    mesh = make_mesh(shape, shape.tensor)
    for part in (1, 10, 100):
        num_bytes = args.gather_gb * 1e9 / part
        rate = all_gather_rate(mesh, int(num_bytes), args.repeats)
        print(f"all-gather of {num_bytes / 1e9:.3g} GB: {rate / 1e9:.3g} GB/s a device", flush=True)
    print(HEADER)
    for model in args.model:
        cfg = quickstart_config(264, 257, 258, 256) if args.tiny else SIZES[model]
        for size in inference_sizes(shape):
            name = f"| {model} | {shape} | {size}"
            try:
                print(f"{name} | {relayout(cfg, shape, size, args.repeats)} |", flush=True)
            except jax.errors.JaxRuntimeError as error:
                print(f"{name} | failed: {str(error).splitlines()[0][:160]} |", flush=True)


if __name__ == "__main__":
    main()
