"""Loading: a Hugging Face directory into sharded parameters, one shard at a time through the host.

Names and shapes are checked before any data is read. A shard is cut out of the memory-mapped
tensors, put on its devices and dropped: the host never holds a whole model, or a whole tensor.
"""

import logging
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshes.layout import Layout
from rlhf_jax.hf.checkpoint import Checkpoint, open_checkpoint, shorten
from rlhf_jax.hf.pieces import (
    HEADS,
    LM_HEAD,
    SCORE_HEAD,
    Leaf,
    all_shapes,
    embedding_name,
    find_prefix,
    plan_leaves,
)
from rlhf_jax.hf.tensors import FLOAT_DTYPES, StoredTensor
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.params import Params
from rlhf_jax.models.quantized import quantize_leaf

log = logging.getLogger(__name__)

Head = Literal["load", "new"]
Bounds = tuple[tuple[int, int], ...]
"""First and last (exclusive) index in every dimension."""


@dataclass
class LoadReport:
    """What loading cost on this host; bytes are of the arrays made from the files."""

    num_tensors: int = 0
    bytes_read: int = 0
    peak_host_bytes: int = 0
    largest_shard_bytes: int = 0
    seconds: float = 0.0
    live_bytes: int = field(default=0, repr=False)

    def __str__(self) -> str:
        """`37 tensors, 1.3 MB in 0.1 s`"""
        return f"{self.num_tensors} tensors, {self.bytes_read / 1e6:.1f} MB in {self.seconds:.1f} s"

    def take(self, shard: np.ndarray) -> None:
        """Count an array that was made."""
        self.live_bytes += shard.nbytes
        self.bytes_read += shard.nbytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.live_bytes)
        self.largest_shard_bytes = max(self.largest_shard_bytes, shard.nbytes)

    def release(self, shard: np.ndarray) -> None:
        """Count it out again."""
        self.live_bytes -= shard.nbytes


def load_params(
    directory: Path, cfg: ModelConfig, specs: Any, layout: Layout, dtype: Any, *,
    head: Head = "load", instead: Mapping[str, StoredTensor] | None = None,
    in_int8: Collection[str] = (),
) -> Any:  # fmt: skip
    """Parameters read from `directory`, in `layout` and `dtype`.

    `specs` is `param_specs(cfg)`, or `scalar_specs(cfg)` for a reward model or critic: its head
    comes from the checkpoint, or with `head="new"` from its initialiser (a model without head).
    Tensors of `instead` (an adapter's) are read in place of the directory's, or added. Matrices
    whose paths in a decoder are in `in_int8` are quantized as they come.
    Raises ValueError or FileNotFoundError that name the file and the tensors that do not fit.
    """
    params, report = load_with_report(
        directory, cfg, specs, layout, dtype, head=head, instead=instead, in_int8=in_int8
    )
    log.info("loaded %s: %s", directory, report)
    return params


def load_with_report(
    directory: Path, cfg: ModelConfig, specs: Any, layout: Layout, dtype: Any, *,
    head: Head = "load", instead: Mapping[str, StoredTensor] | None = None,
    in_int8: Collection[str] = (),
) -> tuple[Any, LoadReport]:  # fmt: skip
    """`load_params`, and what it cost."""
    began, report = time.perf_counter(), LoadReport()
    found = open_checkpoint(directory)
    if cfg.tie_embeddings and isinstance(specs, Params):
        check_tied(found, cfg)
    checkpoint = replaced(found, cfg, instead or {})
    leaves = plan(specs, cfg, checkpoint)
    check(leaves, cfg, checkpoint, head)
    arrays, near = [], replace(layout, memory=None)
    for leaf in leaves:
        if leaf.path == "head_W" and head == "new":
            arrays.append(new_leaf(leaf, layout, dtype))
            continue
        narrow = leaf.path.removeprefix("body.") in in_int8
        place = near if narrow else layout
        array = load_leaf(leaf, checkpoint.tensors, place, np.dtype(dtype), report)
        arrays.append(quantize_leaf(array, leaf.spec, layout) if narrow else array)
        report.num_tensors += len(leaf.tensor_shapes())
    report.seconds = time.perf_counter() - began
    tree = jax.tree.structure(specs, is_leaf=lambda node: hasattr(node, "axes"))
    return jax.tree.unflatten(tree, arrays), report


def check_tied(checkpoint: Checkpoint, cfg: ModelConfig) -> None:
    """ValueError where an unembedding is there that differs from the embedding it is tied to."""
    tensors = checkpoint.tensors
    prefix = find_prefix(find_family(cfg.family), tensors)
    head, table = tensors.get(LM_HEAD), tensors.get(embedding_name(cfg, prefix))
    if head is None or table is None or head == table:
        return
    if not np.array_equal(head.view(), table.view()):
        raise ValueError(
            f"{checkpoint.source}: {LM_HEAD} differs from the embedding, to which config.json "
            "ties it; transformers 5 leaves them apart: write tie_word_embeddings false there"
        )


def replaced(
    checkpoint: Checkpoint, cfg: ModelConfig, instead: Mapping[str, StoredTensor]
) -> Checkpoint:
    """A checkpoint with other tensors, named as the causal model's, in place of its own."""
    family = find_family(cfg.family)
    usual, prefix = family.body_prefixes[0], find_prefix(family, checkpoint.tensors)
    named = {
        prefix + name.removeprefix(usual) if name.startswith(usual) else name: tensor
        for name, tensor in instead.items()
    }
    heads = {name: None for name in HEADS if named.keys() & set(HEADS)}
    kept = {name: t for name, t in checkpoint.tensors.items() if name not in heads}
    return replace(checkpoint, tensors=kept | named)


def has_scalar_head(directory: Path) -> bool:
    """Whether a directory holds a reward model: a checkpoint with a scalar head."""
    return any(name in open_checkpoint(directory).tensors for name in HEADS)


def plan(specs: Any, cfg: ModelConfig, checkpoint: Checkpoint) -> list[Leaf]:
    """The leaves, by the names that this checkpoint has."""
    prefix = find_prefix(find_family(cfg.family), checkpoint.tensors)
    heads = [name for name in HEADS if name in checkpoint.tensors]
    return plan_leaves(specs, cfg, prefix, heads[0] if heads else SCORE_HEAD)


def check(leaves: list[Leaf], cfg: ModelConfig, checkpoint: Checkpoint, head: Head) -> None:
    """One ValueError for all tensors that are missing, unknown, misshapen or not floats."""
    scalar = any(leaf.path == "head_W" for leaf in leaves)
    expected = dict(all_shapes(leaf for leaf in leaves if head == "load" or leaf.path != "head_W"))
    found = checkpoint.tensors
    ignored = [*find_family(cfg.family).ignored]
    if scalar or cfg.tie_embeddings:
        ignored.append(r"lm_head\.weight")
    missing = [name for name in expected if name not in found]
    extra = [
        name
        for name in found
        if name not in expected and not any(re.fullmatch(rule, name) for rule in ignored)
    ]
    wrong = [
        f"{name} has shape {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    integers = [
        f"{name} ({found[name].dtype})"
        for name in expected
        if name in found and found[name].dtype not in FLOAT_DTYPES.values()
    ]
    faults = {"missing": missing, "not expected": extra, "misshapen": wrong, "no floats": integers}
    lines = [f"{kind}: {shorten(names)}" for kind, names in faults.items() if names]
    lines += explain_head(missing, extra, head)
    if lines:
        raise ValueError(
            f"{checkpoint.source} does not fit its config.json\n  " + "\n  ".join(lines)
        )


def explain_head(missing: list[str], extra: list[str], head: Head) -> list[str]:
    """What to do where the scalar head is what does not fit."""
    if set(missing) & set(HEADS):
        return ["this is a language model, not a reward model: train one from it first (--step 2)"]
    if set(extra) & set(HEADS):
        where = "a new head was asked for" if head == "new" else "a language model was asked for"
        return [f"this is a reward model, but {where}"]
    return []


def new_leaf(leaf: Leaf, layout: Layout, dtype: Any) -> jax.Array:
    """A scalar head as its initialiser makes it; heads start from a constant."""
    init = jax.jit(
        lambda: leaf.spec.initialize(jax.random.key(0), dtype),
        out_shardings=layout.param_sharding(leaf.spec),
    )
    return init()


def load_leaf(
    leaf: Leaf,
    tensors: Mapping[str, StoredTensor],
    layout: Layout,
    dtype: np.dtype,
    report: LoadReport,
) -> jax.Array:
    """One parameter: every distinct shard is read once, put on its devices and dropped."""
    sharding, shape = layout.param_sharding(leaf.spec), leaf.spec.shape
    holders: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = [cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)]
        holders.setdefault(tuple(bounds), []).append(device)
    arrays = []
    for bounds, devices in holders.items():
        shard = read_shard(leaf, tensors, bounds, dtype)
        report.take(shard)
        # An alias of host memory could not be donated to the update.
        places = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in devices]
        copies = [jax.device_put(shard, place, may_alias=False) for place in places]
        arrays += jax.block_until_ready(copies)
        report.release(shard)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def read_shard(
    leaf: Leaf,
    tensors: Mapping[str, StoredTensor],
    bounds: Bounds,
    dtype: np.dtype,
) -> np.ndarray:
    """The part of a leaf within `bounds`, cast to `dtype`; only its slices are read."""
    (first, last), columns = bounds[0], tuple(slice(*pair) for pair in bounds[1:])
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    for piece in leaf.pieces:
        low, high = max(first, piece.row), min(last, piece.row + piece.num_rows)
        if low >= high:
            continue
        start = piece.tensor_row + low - piece.row
        rows = slice(start, start + high - low)
        stored = tensors[piece.tensor].view()
        where = (*(columns or (0,)), rows) if piece.transposed else (rows, *columns)
        out[low - first : high - first] = stored[where].T if piece.transposed else stored[where]
    return out
