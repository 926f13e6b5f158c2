"""Bytes that the programs of training need on one device, by formula, before they are compiled.

What lives in arguments (weights, masters, moments) is exact. What a program holds beside them is
what XLA schedules: the formulas name the arrays that are alive at its largest moment, and tests
compare them with compiled programs.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from meshes.layout import Layout
from meshes.spec import ParamSpec
from rlhf_jax.models.adapted import without_adapters
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import Remat
from rlhf_jax.models.lora import LoRAConfig, adapted_specs, adapters_in, split, trains
from rlhf_jax.models.params import (
    compute_layout,
    generate_layout,
    is_spec,
    layer_specs,
    param_specs,
    scalar_specs,
    store_layout,
)
from rlhf_jax.models.scoring import CHUNK

FLOAT32 = 4
MOMENTS = 2


@dataclass(frozen=True)
class Rows:
    """Rows of tokens that one program reads; `counted` positions of each have logits."""

    rows: int
    length: int
    counted: int


@dataclass(frozen=True)
class ModelMemory:
    """One model on one mesh.

    Attributes:
        lora: of a model that trains; None: it is frozen.
        scalar: it has a scalar head in place of the unembedding.
        fused_attention: no matrix of attention scores ever exists (cuDNN).
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
        plain = scalar_specs(self.cfg) if self.scalar else param_specs(self.cfg)
        return tree_bytes(plain, self.store, self.itemsize)

    def copied(self) -> int:
        """What a reference without adapters copies: what trains and is no adapter."""
        assert self.lora is not None
        moving = without_adapters(trains(self.specs, self.lora))
        plain = scalar_specs(self.cfg) if self.scalar else param_specs(self.cfg)
        return tree_bytes(split(plain, moving)[0], self.store, self.itemsize)

    def masters(self) -> int:
        """The float32 originals of what trains; none where the working copy is float32 itself."""
        return 0 if self.itemsize == FLOAT32 else self.gradients()

    def moments(self) -> int:
        """AdamW's."""
        return MOMENTS * self.gradients()

    def gradients(self) -> int:
        """Float32 gradients of what trains, in STORE."""
        return tree_bytes(self.trained, self.store, FLOAT32)

    def held_gradients(self, num_parts: int) -> int:
        """Gradients of a whole batch: in float32 where parts are added up, else as the backward
        pass writes them.
        """
        return self.gradients() * (FLOAT32 if num_parts > 1 else self.itemsize) // FLOAT32

    def rollout_copy(self) -> int:
        """What decoding gathers: nothing where STORE and GENERATE agree."""
        return sum(
            leaf_bytes(self.rollout, spec, self.itemsize)
            for spec in jax.tree.leaves(self.specs, is_leaf=is_spec)
            if self.rollout.spec(*spec.axes) != self.store.spec(*spec.axes)
        )

    def cache(self, rows: Rows) -> int:
        """Keys and values of every layer."""
        cfg = self.cfg
        shape = (rows.rows, cfg.num_kv_heads, rows.length, cfg.head_size)
        axes = ("batch", "heads", None, None)
        return 2 * cfg.num_layers * local_bytes(self.rollout, shape, axes, self.itemsize)

    def merged_copy(self) -> int:
        """The weights that adapters are merged into, as decoding reads them."""
        return sum(
            leaf_bytes(self.rollout, node.base_FD, self.itemsize)
            for _, node in adapters_in(self.specs)
            if self.rollout.spec(*node.base_FD.axes) == self.store.spec(*node.base_FD.axes)
        )

    def generating(self, rows: Rows, *, merged: bool = False) -> int:
        """Prefill and decode of `rows`, beside the weights: the copy, the cache and, at the last
        layer of the prompts, what that layer computes in place of its share of the cache.
        """
        cache, layers = self.cache(rows), self.cfg.num_layers
        prompts = Rows(rows.rows, rows.length - rows.counted, 1)
        last = max(cache // layers, self.layer_forward(prompts, self.rollout))
        logits = local_bytes(
            self.rollout, (rows.rows, self.cfg.padded_vocab), ("batch", None), 2 * FLOAT32
        )
        copies = self.rollout_copy() + (self.merged_copy() if merged else 0)
        return copies + cache * (layers - 1) // layers + last + logits

    def scoring(self, rows: Rows) -> int:
        """A forward pass without gradients: a layer and its weights, or logits."""
        layer = self.layer_forward(rows, self.compute) + self.gathered_layer()
        return self.gathered_outer() + max(layer, self.head_forward(rows))

    def training(self, rows: Rows, remat: Remat, num_parts: int) -> int:
        """The gradient of `rows` in so many parts: what earlier parts added up, what the forward
        pass keeps for the backward pass, and the larger of the head and a layer of it.
        """
        part = Rows(rows.rows // num_parts, rows.length, rows.counted)
        total, kept = self.held_gradients(num_parts), self.cfg.num_layers * self.kept(part, remat)
        layer = self.layer_backward(part) + 2 * self.gathered_layer()
        outer = self.gathered_outer()
        if num_parts > 1:
            return total + outer + kept + max(self.head_backward(part), layer)
        return outer + max(
            kept + self.head_backward(part), kept // self.cfg.num_layers + layer + total
        )

    def kept(self, rows: Rows, remat: Remat) -> int:
        """What one layer's forward pass keeps for its backward pass."""
        wide = self.widths(rows, self.compute)
        kept = wide["D"]
        if remat != "full":  # XLA keeps the feed-forward's product and its activation
            kept += wide["E"] + wide["D"] + 2 * wide["F"]
        if remat == "none":
            kept += wide["H"] + 2 * wide["D"] + self.scores(rows)
        return kept

    def layer_forward(self, rows: Rows, layout: Layout) -> int:
        """A layer's input and output, and the larger of attention and feed-forward."""
        wide = self.widths(rows, layout)
        attention = wide["E"] + wide["H"] + self.scores(rows)
        return 2 * wide["D"] + max(attention, wide["F"] + wide["D"])

    def layer_backward(self, rows: Rows) -> int:
        """The layer once more, and gradients of its widest arrays."""
        wide = self.widths(rows, self.compute)
        again = wide["E"] + wide["H"] + wide["F"] + 3 * wide["D"]
        return again + wide["F"] + 2 * wide["D"] + 2 * self.scores(rows)

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

    def scores(self, rows: Rows) -> int:
        """The matrix of attention scores, where there is one, and its softmax: float32."""
        if self.fused_attention:
            return 0
        heads, length = self.cfg.num_heads, rows.length
        shape, axes = (rows.rows, heads, length, length), ("batch", "heads", None, None)
        return 2 * local_bytes(self.compute, shape, axes, FLOAT32)

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

    def head_backward(self, rows: Rows) -> int:
        """Logits of a chunk, their gradient, and the float32 gradient of the whole unembedding."""
        if self.scalar:
            return 0
        return 2 * self.logits(rows) + FLOAT32 * self.cfg.padded_vocab * self.cfg.embed_width

    def logits(self, rows: Rows) -> int:
        local = rows.rows // self.compute.batch_size_divisor
        return FLOAT32 * min(CHUNK, local * rows.counted) * self.cfg.padded_vocab


def local_bytes(
    layout: Layout, shape: tuple[int, ...], axes: tuple[str | None, ...], itemsize: int
) -> int:
    """Of an array, on one device."""
    return itemsize * math.prod(layout.sharding(*axes).shard_shape(shape))


def leaf_bytes(layout: Layout, spec: ParamSpec, itemsize: int) -> int:
    """Of a parameter, on one device."""
    return local_bytes(layout, spec.shape, spec.axes, itemsize)


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
