"""Bytes that the programs of training need on one device, by formula, before they are compiled.

What lives in arguments (weights, masters, moments) is exact. What a program holds beside them is
what XLA schedules: the formulas name the arrays that are alive at its largest moment, and tests
compare them with compiled programs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from meshes.layout import Layout
from meshes.spec import ParamSpec
from rlhf_jax.engine.offloaded import piece_name
from rlhf_jax.engine.optimizer import MomentsDtype, Optim
from rlhf_jax.engine.slots import group_size
from rlhf_jax.models.adapted import is_adapted, without_adapters
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import Remat
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, adapters_in, split, trains
from rlhf_jax.models.narrow import Narrow, declare_narrow
from rlhf_jax.models.params import (
    compute_layout,
    generate_layout,
    is_spec,
    layer_specs,
    param_specs,
    scalar_specs,
    store_layout,
)
from rlhf_jax.models.quantized import plain_spec
from rlhf_jax.models.remat import keeps_products
from rlhf_jax.models.scoring import CHUNK

FLOAT32 = 4
MOMENTS = {"adamw": 2, "lion": 1}
FACTORED = 128
"""Adafactor keeps a row and a column of matrices with no dimension below this, as optax has it."""


@dataclass(frozen=True)
class Rows:
    """Rows of tokens that one program reads; `counted` positions of each have logits.

    Where rows share sequences, `sequence` is the most tokens of one.
    """

    rows: int
    length: int
    counted: int
    sequence: int | None = None


@dataclass(frozen=True)
class ModelMemory:
    """One model on one mesh.

    Attributes:
        lora: of a model that trains; None: it is frozen.
        scalar: it has a scalar head in place of the unembedding.
        fused_attention: no matrix of attention scores ever exists (cuDNN, or the kernel).
    """

    cfg: ModelConfig
    mesh: Mesh | AbstractMesh
    dtype: jnp.dtype
    lora: LoRAConfig | None
    scalar: bool
    fused_attention: bool

    @property
    def store(self) -> Layout:
        return store_layout(self.cfg, self.mesh)  # pyright: ignore[reportArgumentType]

    @property
    def compute(self) -> Layout:
        return compute_layout(self.cfg, self.mesh)  # pyright: ignore[reportArgumentType]

    @property
    def rollout(self) -> Layout:
        return generate_layout(self.cfg, self.mesh)  # pyright: ignore[reportArgumentType]

    @property
    def specs(self) -> Any:
        """The declaration of every parameter, adapters included."""
        plain = scalar_specs(self.cfg) if self.scalar else param_specs(self.cfg)
        return plain if self.lora is None else adapted_specs(plain, self.cfg, self.lora)

    @property
    def trained(self) -> Any:
        """The declaration of what trains."""
        return None if self.lora is None else split(self.specs, trains(self.specs, self.lora))[0]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def weights(self) -> int:
        """The working copy, in STORE."""
        return tree_bytes(self.specs, self.store, self.itemsize)

    def plain_weights(self) -> int:
        """The model without adapters."""
        return tree_bytes(without_adapters(self.specs), self.store, self.itemsize)

    def copied(self) -> int:
        """What a reference without adapters copies: what trains and is no adapter."""
        assert self.lora is not None
        moving = without_adapters(trains(self.specs, self.lora))
        plain = without_adapters(self.specs)
        return tree_bytes(split(plain, moving)[0], self.store, self.itemsize)

    def masters(self) -> int:
        """The float32 originals of what trains; none where the working copy is float32 itself."""
        return 0 if self.itemsize == FLOAT32 else self.gradients()

    def moments(self, optim: Optim = "adamw", dtype: MomentsDtype = "float32") -> int:
        """What an optimizer keeps for each parameter that trains."""
        if optim == "adafactor":
            leaves = jax.tree.leaves(self.trained, is_leaf=is_spec)
            return sum(factored_bytes(self.store, spec) for spec in leaves)
        return MOMENTS[optim] * self.gradients() * jnp.dtype(dtype).itemsize // FLOAT32

    def largest_piece(self) -> int:
        """The float32 bytes of the largest piece that an offloaded optimizer updates at a time."""
        sizes: dict[str, int] = {}
        for path, spec in jax.tree.leaves_with_path(self.trained, is_leaf=is_spec):
            name, size = piece_name(path), leaf_bytes(self.store, spec, FLOAT32)
            sizes[name] = sizes.get(name, 0) + size
        return max(sizes.values(), default=0)

    def gradients(self) -> int:
        """Float32 gradients of what trains, in STORE."""
        return tree_bytes(self.trained, self.store, FLOAT32)

    def held_gradients(self, num_parts: int) -> int:
        """Gradients of a whole batch: in float32 where parts are added up, else as the backward
        pass writes them.
        """
        return self.gradients() * (FLOAT32 if num_parts > 1 else self.itemsize) // FLOAT32

    def rollout_copy(self, weights: Narrow = "same") -> int:
        """What decoding gathers (nothing where STORE and GENERATE agree), and all that it rounds to
        `weights`.
        """
        specs = self.specs
        stored = {
            id(spec)
            for spec in jax.tree.leaves(specs, is_leaf=is_spec)
            if self.rollout.spec(*spec.axes) == self.store.spec(*spec.axes)
        }
        return sum(
            leaf_bytes(self.rollout, spec, self.itemsize)
            for spec in jax.tree.leaves(declare_narrow(specs, weights), is_leaf=is_spec)
            if id(spec) not in stored
        )

    def cache(self, rows: Rows, kind: Narrow = "same") -> int:
        """Keys and values of every layer; of one byte a number and their scales, if not "same"."""
        cfg = self.cfg
        shape = (rows.rows, cfg.num_kv_heads, rows.length, cfg.head_size)
        axes = ("batch", "heads", None, None)
        itemsize = self.itemsize if kind == "same" else 1
        scales = 0 if kind == "same" else local_bytes(self.rollout, shape[:3], axes[:3], FLOAT32)
        return 2 * cfg.num_layers * (local_bytes(self.rollout, shape, axes, itemsize) + scales)

    def merged_copy(self) -> int:
        """The weights that adapters are merged into, as decoding reads them."""
        matrices = [plain_spec(node.base_FD) for _, node in adapters_in(self.specs)]
        return sum(
            leaf_bytes(self.rollout, matrix, self.itemsize)
            for matrix in matrices
            if self.rollout.spec(*matrix.axes) == self.store.spec(*matrix.axes)
        )

    def pinned(self, weights: Narrow = "same", *, merged: bool = False) -> int:
        """All that decoding reads, where it is kept between generations: buffers of its own, also
        of what STORE and GENERATE have alike.
        """
        specs = self.specs
        if merged:
            specs = jax.tree.map(
                lambda node: plain_spec(node.base_FD) if is_adapted(node) else node,
                specs, is_leaf=is_adapted,
            )  # fmt: skip
        return tree_bytes(declare_narrow(specs, weights), self.rollout, self.itemsize)

    def generating(
        self,
        rows: Rows,
        *,
        pinned: bool = False,
        merged: bool = False,
        slots: int | None = None,
        weights: Narrow = "same",
        kv_cache: Narrow = "same",
    ) -> int:
        """Prefill and decode of `rows`, beside the weights: the copy, the cache and, at the last
        layer of the prompts, what that layer computes in place of its share of the cache.

        With fewer `slots` than rows the cache is theirs, whole before any prompt is read; prompts
        are read in groups.
        """
        at_once = min(slots or rows.rows, rows.rows)
        in_slots = at_once < rows.rows
        cache = self.cache(replace(rows, rows=at_once), kv_cache)
        layers = self.cfg.num_layers
        together = group_size(at_once, self.rollout.batch_size_divisor) if in_slots else at_once
        prompts = Rows(together, rows.length - rows.counted, 1)
        last = self.layer_forward(prompts, self.rollout)
        last = cache // layers + last if in_slots else max(cache // layers, last)
        logits = local_bytes(
            self.rollout, (at_once, self.cfg.padded_vocab), ("batch", None), 2 * FLOAT32
        )
        copies = self.rollout_copy(weights) + (self.merged_copy() if merged else 0)
        if pinned:
            copies = self.pinned(weights, merged=merged)
        return copies + cache * (layers - 1) // layers + last + logits

    def scoring(self, rows: Rows) -> int:
        """A forward pass without gradients: a layer and its weights, or logits."""
        layer = self.layer_forward(rows, self.compute) + self.gathered_layer()
        return self.gathered_outer() + max(layer, self.head_forward(rows))

    def training(self, rows: Rows, remat: Remat, num_parts: int) -> int:
        """The gradient of `rows` in so many parts: what earlier parts added up, what the forward
        pass keeps for the backward pass, and the larger of the head and a layer of it.
        """
        part = replace(rows, rows=rows.rows // num_parts)
        total, kept = self.held_gradients(num_parts), self.cfg.num_layers * self.kept(part, remat)
        layer = self.layer_backward(part) + 2 * self.gathered_layer()
        outer, head = self.gathered_outer(), self.head_backward(part, remat)
        if num_parts > 1:
            return total + outer + kept + max(head, layer)
        return outer + max(kept + head, kept // self.cfg.num_layers + layer + total)

    def kept(self, rows: Rows, remat: Remat) -> int:
        """What one layer's forward pass keeps for its backward pass (`models/remat.py`)."""
        wide = self.widths(rows, self.compute)
        kept = wide["D"]
        if remat != "full":
            kept += wide["H"] + self.softmax_sums(rows)
        if remat in ("mlp", "dots", "none"):
            kept += wide["E"] + wide["D"]
        if remat in ("dots", "none"):
            kept += wide["F"] + (0 if self.cfg.pre_norm else wide["D"])
        if remat == "none":
            kept += 2 * wide["D"] + self.scores(rows, self.compute) + self.gathered_layer()
            kept += self.dropped(rows)
        return kept

    def dropped(self, rows: Rows) -> int:
        """What the adapters of a layer keep where they drop out: of each its input, and a byte a
        number that says what passed. Those of `qkv_ED` and `up_FD` stand in place of what a norm
        wrote, which the frozen matrix beside them does not need.
        """
        if self.lora is None or not self.lora.drops:
            return 0
        wide = self.widths(rows, self.compute)
        mlp = wide["F"] // (2 if self.cfg.activation == "silu_gated" else 1)
        inputs = {"out_ED": wide["H"], "down_FD": mlp}
        total = 0
        for path, _ in adapters_in(self.specs):
            name = path.rpartition(".")[2]
            size = inputs.get(name, wide["D"])
            total += size // self.itemsize + (0 if name in ("qkv_ED", "up_FD") else size)
        return total // self.cfg.num_layers

    def softmax_sums(self, rows: Rows) -> int:
        """What fused attention notes of each query's softmax: float32."""
        if not self.fused_attention:
            return 0
        shape = (rows.rows, self.cfg.num_heads, rows.length)
        return local_bytes(self.compute, shape, ("batch", "heads", None), FLOAT32)

    def layer_forward(self, rows: Rows, layout: Layout) -> int:
        """A layer's input and output, and the larger of attention and feed-forward."""
        wide = self.widths(rows, layout)
        attention = wide["E"] + wide["H"] + self.scores(rows, layout)
        return 2 * wide["D"] + max(attention, wide["F"] + wide["D"])

    def layer_backward(self, rows: Rows) -> int:
        """The layer once more, and gradients of its widest arrays."""
        wide = self.widths(rows, self.compute)
        again = wide["E"] + wide["H"] + wide["F"] + 3 * wide["D"]
        if self.lora is not None and self.lora.dim:  # adapters' products, before they are added
            again += wide["E"] + wide["F"] + self.dropped(rows)
        return again + wide["F"] + 2 * wide["D"] + 2 * self.scores(rows, self.compute)

    def widths(self, rows: Rows, layout: Layout) -> dict[str, int]:
        """Bytes of the arrays of a layer by their last dimension."""
        cfg, axes = self.cfg, {"D": None, "E": "qkv", "H": "heads", "F": "mlp"}
        mlp = cfg.padded_mlp * (2 if cfg.activation == "silu_gated" else 1)
        sizes = {"D": cfg.width, "E": cfg.qkv_rows, "H": cfg.num_heads * cfg.head_size, "F": mlp}
        return {
            name: local_bytes(
                layout, (rows.rows, rows.length, sizes[name]), ("batch", None, axis), self.itemsize
            )
            for name, axis in axes.items()
        }

    def scores(self, rows: Rows, layout: Layout) -> int:
        """The matrix of attention scores, where there is one, and its softmax: float32. A token of
        a sequence has one with every other, whichever rows they are of.
        """
        if self.fused_attention:
            return 0
        heads, length = self.cfg.num_heads, rows.length
        keys = max(length, rows.sequence or 0)
        shape, axes = (rows.rows, heads, length, keys), ("batch", "heads", None, None)
        return 2 * local_bytes(layout, shape, axes, FLOAT32)

    def gathered_layer(self) -> int:
        """Weights of one layer as it computes, where they are not stored so."""
        return gathered_bytes(layer_specs(self.cfg), self.store, self.compute, self.itemsize)

    def gathered_outer(self) -> int:
        """The embedding as the program reads it, where it is not stored so."""
        embedding = param_specs(self.cfg).embed_VW
        return gathered_bytes(embedding, self.store, self.compute, self.itemsize)

    def head_forward(self, rows: Rows) -> int:
        """Logits of a chunk."""
        return 0 if self.scalar else 2 * self.logits(rows)

    def head_backward(self, rows: Rows, remat: Remat) -> int:
        """Logits of a chunk, their gradient, the float32 gradient of the unembedding (rounded too,
        where it is whole before it is scattered; none where adapters alone train), and the
        probabilities where they are kept.
        """
        if self.scalar:
            return 0
        cfg, table = self.cfg, ("vocab", None)
        gradient = 0
        if self.lora is None or not (self.lora.dim and self.lora.only):
            whole = local_bytes(self.compute, (cfg.padded_vocab, cfg.embed_width), table, FLOAT32)
            gradient = whole + self.gathered_outer()
        kept = keeps_products(remat) * self.scored(rows) * self.columns * self.itemsize
        return 2 * self.logits(rows) + gradient + kept

    def logits(self, rows: Rows) -> int:
        return FLOAT32 * min(CHUNK, self.scored(rows)) * self.columns

    def scored(self, rows: Rows) -> int:
        """Positions with logits, on one device."""
        return rows.rows // self.compute.batch_size_divisor * rows.counted

    @property
    def columns(self) -> int:
        """Entries of the vocabulary, on one device."""
        return local_bytes(self.compute, (self.cfg.padded_vocab,), ("vocab",), 1)


def local_bytes(
    layout: Layout, shape: tuple[int, ...], axes: tuple[str | None, ...], itemsize: int
) -> int:
    """Of an array, on one device."""
    return itemsize * math.prod(layout.sharding(*axes).shard_shape(shape))


def leaf_bytes(layout: Layout, spec: ParamSpec, itemsize: int) -> int:
    """Of a parameter, on one device; `itemsize` is the model's."""
    own = itemsize if spec.dtype is None else jnp.dtype(spec.dtype).itemsize
    return local_bytes(layout, spec.shape, spec.axes, own)


def factored_bytes(layout: Layout, spec: ParamSpec) -> int:
    """What Adafactor keeps of a parameter, on one device."""
    if len(spec.shape) != 2 or min(spec.shape) < FACTORED:
        return leaf_bytes(layout, spec, FLOAT32)
    sides = zip(spec.shape, spec.axes, strict=True)
    return sum(local_bytes(layout, (size,), (axis,), FLOAT32) for size, axis in sides)


def tree_bytes(specs: Any, layout: Layout, itemsize: int) -> int:
    """Of parameters, on one device."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(leaf_bytes(layout, spec, itemsize) for spec in leaves)


def gathered_bytes(specs: Any, store: Layout, layout: Layout, itemsize: int) -> int:
    """Of those parameters that lie elsewhere in `layout` than in `store`."""
    return sum(
        leaf_bytes(layout, spec, itemsize)
        for spec in jax.tree.leaves(specs, is_leaf=is_spec)
        if layout.spec(*spec.axes) != store.spec(*spec.axes)
    )
