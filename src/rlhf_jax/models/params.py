"""The parameter tree: shape, logical axes and initialiser of every parameter, on one line each.

The trees are generic in their leaf: `Params[ParamSpec]`, `Params[jax.Array]` and
`Params[NamedSharding]` are one class. Matrices have their tensor-parallel dimension first.
"""

import functools
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from meshes.layout import Layout
from meshes.spec import Constant, Normal, ParamSpec, Sinusoids
from rlhf_jax.models.adapted import Matrix
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.quantized import is_quantized, plain_spec, quantize_leaf


@flax.struct.dataclass
class Norm[Leaf]:
    """Layer norm, or RMS norm where `bias_D` is None."""

    scale_D: Leaf
    bias_D: Leaf | None


@flax.struct.dataclass
class LayerParams[Leaf]:
    """One decoder layer. `qkv_ED` holds, per KV group, its query heads, its key, its value.

    Its matrices may have adapters beside them.
    """

    attention_norm: Norm[Leaf]
    qkv_ED: Matrix[Leaf]
    qkv_bias_E: Leaf | None
    out_ED: Matrix[Leaf]
    out_bias_D: Leaf | None
    mlp_norm: Norm[Leaf]
    gate_FD: Matrix[Leaf] | None
    up_FD: Matrix[Leaf]
    up_bias_F: Leaf | None
    down_FD: Matrix[Leaf]
    down_bias_D: Leaf | None


@flax.struct.dataclass
class Params[Leaf]:
    """A decoder. `unembed_VW` is None where the embedding is tied."""

    embed_VW: Leaf
    positions_PD: Leaf | None
    project_in_DW: Leaf | None
    project_out_WD: Leaf | None
    layers: list[LayerParams[Leaf]]
    final_norm: Norm[Leaf] | None
    unembed_VW: Leaf | None


@flax.struct.dataclass
class ScalarModel[Leaf]:
    """A decoder body with a scalar head: a reward model or a critic.

    The head reads what the unembedding would read: width W (D but for OPT-350M, where W is
    narrower).
    """

    body: Params[Leaf]
    head_W: Leaf


def norm_specs(cfg: ModelConfig) -> Norm[ParamSpec]:
    """The declaration of one norm."""
    one = ParamSpec((cfg.width,), (None,), Constant(1.0), decay=False)
    zero = ParamSpec((cfg.width,), (None,), Constant(0.0), decay=False)
    return Norm(one, zero if cfg.norm == "layer_norm" else None)


def layer_specs(cfg: ModelConfig) -> LayerParams[ParamSpec]:
    """The declaration of one layer."""
    D, F, E, HK = cfg.width, cfg.padded_mlp, cfg.qkv_rows, cfg.num_heads * cfg.head_size
    std, out_std = cfg.init_std, cfg.init_std * cfg.default_init_scale()
    zero = Constant(0.0)
    gated, rows = cfg.activation == "silu_gated", cfg.mlp_width
    return LayerParams(
        attention_norm=norm_specs(cfg),
        qkv_ED=ParamSpec((E, D), ("qkv", None), Normal(std)),
        qkv_bias_E=ParamSpec((E,), ("qkv",), zero, decay=False) if cfg.attention_bias else None,
        out_ED=ParamSpec((HK, D), ("heads", None), Normal(out_std)),
        out_bias_D=ParamSpec((D,), (None,), zero, decay=False) if cfg.output_bias else None,
        mlp_norm=norm_specs(cfg),
        gate_FD=ParamSpec((F, D), ("mlp", None), Normal(std), rows=rows) if gated else None,
        up_FD=ParamSpec((F, D), ("mlp", None), Normal(std), rows=rows),
        up_bias_F=ParamSpec((F,), ("mlp",), zero, decay=False, rows=rows) if cfg.mlp_bias else None,
        down_FD=ParamSpec((F, D), ("mlp", None), Normal(out_std), rows=rows),
        down_bias_D=ParamSpec((D,), (None,), zero, decay=False) if cfg.mlp_bias else None,
    )


def param_specs(cfg: ModelConfig) -> Params[ParamSpec]:
    """The declaration of every parameter of a decoder."""
    D, W, V, std = cfg.width, cfg.embed_width, cfg.padded_vocab, Normal(cfg.init_std)
    learned, projected = cfg.positions == "learned", W != D
    waves = Sinusoids(cfg.init_std, cfg.position_offset) if cfg.sinusoid_init else std
    embedding = ParamSpec((V, W), ("vocab", None), std, rows=cfg.vocab_size)
    return Params(
        embed_VW=embedding,
        positions_PD=ParamSpec((cfg.position_rows, D), (None, None), waves) if learned else None,
        project_in_DW=ParamSpec((D, W), (None, None), std) if projected else None,
        project_out_WD=ParamSpec((W, D), (None, None), std) if projected else None,
        layers=[layer_specs(cfg) for _ in range(cfg.num_layers)],
        final_norm=norm_specs(cfg) if cfg.final_norm else None,
        unembed_VW=None if cfg.tie_embeddings else embedding,
    )


def scalar_specs(cfg: ModelConfig) -> ScalarModel[ParamSpec]:
    """The declaration of a reward model or critic: a zero head gives 0 everywhere at first."""
    return ScalarModel(param_specs(cfg), ParamSpec((cfg.embed_width,), (None,), Constant(0.0)))


def is_spec(node: object) -> bool:
    """Whether a node of a tree is a parameter's declaration."""
    return isinstance(node, ParamSpec)


def store_layout(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Layout:
    """Where the parameters of a model live."""
    return Layout.create(mesh, "store", cfg.store_units())


def compute_layout(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Layout:
    """Where training and scoring compute."""
    return Layout.create(mesh, "compute", cfg.shard_units())


def generate_layout(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Layout:
    """Where prefill and decode compute."""
    return Layout.create(mesh, "generate", cfg.shard_units())


def shardings[Tree](specs: Tree, layout: Layout) -> Tree:
    """The tree with a NamedSharding in place of each spec."""
    return jax.tree.map(layout.param_sharding, specs, is_leaf=is_spec)


def abstract_params[Tree](specs: Tree, layout: Layout, dtype: jnp.dtype) -> Tree:
    """ShapeDtypeStructs with shardings: what a program is compiled for without weights."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype or dtype, sharding=layout.param_sharding(spec)
        ),
        specs,
        is_leaf=is_spec,
    )


def init_params(specs: Any, layout: Layout, dtype: jnp.dtype, *, key: jax.Array) -> Any:
    """Initial values, born in `layout`: each parameter has its own key, whatever the mesh.

    A matrix declared in int8 gets what it would have, quantized.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=_is_declared)
    keys = jax.random.split(key, len(leaves))
    values = [_initial(leaf, layout, dtype, k) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, values)


def _is_declared(node: Any) -> bool:
    """Whether a node declares one parameter, in int8 or not."""
    return is_spec(node) or (is_quantized(node) and is_spec(node.values_FD))


def _initial(leaf: Any, layout: Layout, dtype: jnp.dtype, key: jax.Array) -> Any:
    """The value of one parameter, which may be declared in int8."""
    if not is_quantized(leaf):
        return _initializer(leaf, layout, dtype)(key)
    whole = plain_spec(leaf)
    value = _initializer(whole, replace(layout, memory=None), dtype)(key)
    return quantize_leaf(value, whole, layout)


@functools.lru_cache(maxsize=256)
def _initializer(spec: ParamSpec, layout: Layout, dtype: jnp.dtype):
    """A compiled program for one kind of parameter: layers share theirs."""
    return jax.jit(
        lambda key: spec.initialize(key, jnp.dtype(spec.dtype or dtype)),
        out_shardings=layout.param_sharding(spec),
    )
