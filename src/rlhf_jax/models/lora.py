"""LoRA: which matrices have adapters, how they start, and which parameters train."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshes.layout import Layout
from meshes.reshard import reshard_params
from meshes.spec import Constant, Initializer, ParamSpec, Uniform
from rlhf_jax.models.adapted import Adapted, is_adapted
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.hf_table import Columns, Groups
from rlhf_jax.models.params import init_params, is_spec
from rlhf_jax.models.quantized import is_quantized, quantized_spec, spec_like

MATRICES = ("qkv_ED", "out_ED", "gate_FD", "up_FD", "down_FD")
HEAD = "head_W"


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters beside the matrices of the decoder layers, which themselves stay as they
    are.
    """

    dim: int = 0
    """Rank of the adapters; 0: none."""
    alpha: float = 16.0
    """The adapter's product counts alpha / dim, as in PEFT; DeepSpeed-Chat's 1 / dim is alpha 1."""
    dropout: float = 0.0
    """On the input of the adapters, in training."""
    modules: tuple[str, ...] = ()
    """Parts of module names, such as q_proj or layers.1.; without any, all linear layers."""
    learning_rate: float | None = 5e-4
    """Of the adapters; None: the stage's. Both follow the stage's schedule."""
    only: bool = False
    """Adapters alone train (and the head of a reward model or critic); otherwise embeddings, norms,
    biases and matrices without adapter train too."""
    load_in_8bit: bool = False
    """Matrices of the layers that do not train are kept in int8, with a scale for each row."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim must be 0 (no adapters) or a rank, got {self.dim}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.learning_rate is not None and self.learning_rate < 0:
            raise ValueError(f"learning_rate must not be negative, got {self.learning_rate}")
        if self.load_in_8bit and not self.dim:
            raise ValueError(
                "load_in_8bit: what trains cannot be in int8, so it needs adapters: give dim a rank"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.dim

    @property
    def drops(self) -> bool:
        """Whether training needs a key for dropout."""
        return self.dim > 0 and self.dropout > 0


def linear_modules(cfg: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Hugging Face's linear layers by the path of the leaf that holds them; a fused one has three.

    `{"layers.0.up_FD": ("model.decoder.layers.0.fc1",), …}`
    """
    table = find_family(cfg.family).table
    gated = cfg.activation == "silu_gated"
    found: dict[str, tuple[str, ...]] = {}
    for number in range(cfg.num_layers):
        for name in MATRICES:
            if name == "gate_FD" and not gated:
                continue
            source = table[f"layers.*.{name}"]
            tensors = vars(source).values()
            found[f"layers.{number}.{name}"] = tuple(
                tensor.format(n=number).removesuffix(".weight") for tensor in tensors
            )
    return found


def select_modules(cfg: ModelConfig, patterns: tuple[str, ...]) -> set[str]:
    """The linear layers whose names contain one of the patterns; without patterns all.

    ValueError where a pattern fits none: it lists the names there are.
    """
    names = [name for names in linear_modules(cfg).values() for name in names]
    unused = [pattern for pattern in patterns if not any(pattern in name for name in names)]
    if unused:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
        raise ValueError(
            f"LoRA: {', '.join(map(repr, unused))} is part of no linear layer's name: "
            f"{cfg.family} of {cfg.num_layers} layers has {', '.join(kinds)}"
        )
    return {name for name in names if not patterns or any(part in name for part in patterns)}


def adapted_specs(specs: Any, cfg: ModelConfig, lora: LoRAConfig) -> Any:
    """The declaration of a model (`param_specs` or `scalar_specs`) with those of its adapters."""
    if lora.dim == 0:
        return specs
    modules, chosen = linear_modules(cfg), select_modules(cfg, lora.modules)

    def place(key_path: Any, spec: ParamSpec) -> Any:
        path = jax.tree_util.keystr(key_path, simple=True, separator=".").removeprefix("body.")
        names = modules.get(path, ())
        ranks = tuple(lora.dim if name in chosen else 0 for name in names)
        if any(ranks):
            return adapter_specs(spec, path, cfg, lora, ranks)
        return quantized_spec(spec) if names and lora.only and lora.load_in_8bit else spec

    return jax.tree_util.tree_map_with_path(place, specs, is_leaf=is_spec)


def adapter_specs(
    spec: ParamSpec, path: str, cfg: ModelConfig, lora: LoRAConfig, ranks: tuple[int, ...]
) -> Adapted[ParamSpec]:
    """One matrix with its adapter. As in PEFT the factor that reads the input starts uniform (He et
    al. 2015 with a = sqrt 5), the other at zero, so that nothing changes at first.
    """
    source = find_family(cfg.family).table[re.sub(r"\d+", "*", path, count=1)]
    rows = spec.shape[0] if spec.rows is None else spec.rows
    reads_rows = isinstance(source, Columns)
    uniform: Initializer = Uniform((rows if reads_rows else spec.shape[1]) ** -0.5)
    side, core = (uniform, Constant(0.0)) if reads_rows else (Constant(0.0), uniform)
    query, head = cfg.heads_per_group * cfg.head_size, cfg.head_size
    rank = sum(ranks)
    fused = isinstance(source, Groups)
    return Adapted(
        base_FD=quantized_spec(spec) if lora.load_in_8bit else spec,
        side_FA=ParamSpec((spec.shape[0], rank), (spec.axes[0], None), side, rows=spec.rows),
        core_AD=ParamSpec((rank, spec.shape[1]), (None, "width"), core),
        scale=lora.scale,
        rate=lora.dropout,
        rows=(query, head, head) if fused else (),
        ranks=ranks if fused else (),
    )


def follow(specs: Any, params: Any) -> Any:
    """The declarations of `params`: those of a model without adapters (`specs`), and an adapter's
    or a matrix's in int8 wherever `params` has one.
    """

    def one(spec: ParamSpec, leaf: Any) -> Any:
        if is_quantized(leaf):
            return spec_like(spec, leaf)
        if not is_adapted(leaf):
            return spec
        side = ParamSpec(leaf.side_FA.shape, (spec.axes[0], None), Constant(0.0), rows=spec.rows)
        core = ParamSpec(leaf.core_AD.shape, (None, "width"), Constant(0.0))
        raw = None if leaf.dropout is None else ParamSpec((2,), (None,), Constant(0.0))
        base = one(spec, leaf.base_FD)
        return replace(leaf, base_FD=base, side_FA=side, core_AD=core, dropout=raw)

    return jax.tree.map(one, specs, params, is_leaf=is_spec)


def reshard_model(params: Any, specs: Any, layout: Layout) -> Any:
    """A model, adapters included, in `layout`; `specs` are those without adapters. Inside jit."""
    return reshard_params(params, follow(specs, params), layout)


def trains(specs: Any, lora: LoRAConfig) -> Any:
    """The tree with True for every parameter that trains.

    Matrices with an adapter never do. With `only` adapters alone do, and a scalar head.
    """

    def one(key_path: Any, node: Any) -> Any:
        if is_adapted(node):
            return replace(node, base_FD=nowhere(node.base_FD), side_FA=True, core_AD=True)
        head = jax.tree_util.keystr(key_path, simple=True, separator=".") == HEAD
        return head or not (lora.only and lora.dim > 0)

    return jax.tree_util.tree_map_with_path(
        one, specs, is_leaf=lambda node: is_spec(node) or is_adapted(node)
    )


def split(params: Any, train: Any) -> tuple[Any, Any]:
    """What trains, and the rest: two trees of one class, each None where the other has a leaf."""
    pick = jax.tree.map(lambda leaf, yes: leaf if yes else None, params, train, is_leaf=is_spec)
    rest = jax.tree.map(lambda leaf, yes: None if yes else leaf, params, train, is_leaf=is_spec)
    return pick, rest


def combine(trained: Any, frozen: Any) -> Any:
    """The whole model again; `frozen` None where everything trains."""
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        trained,
        frozen,
        is_leaf=lambda node: node is None,
    )


def is_adapter(specs: Any) -> Any:
    """The tree with True for the factors of adapters: they have a learning rate of their own."""
    return jax.tree.map(
        lambda node: (
            replace(
                node,
                base_FD=nowhere(node.base_FD),
                side_FA=True,
                core_AD=True,
            )
            if is_adapted(node)
            else False
        ),
        specs,
        is_leaf=lambda node: is_spec(node) or is_adapted(node),
    )


def nowhere(base: Any) -> Any:
    """False for every leaf of a matrix."""
    return jax.tree.map(lambda _: False, base, is_leaf=is_spec)


def attach(params: Any, specs: Any, factors: Any) -> Any:
    """Base weights with `factors` (a tree of `specs` with None for what is no adapter)."""
    frame = jax.tree.map(
        lambda node, leaf: (
            replace(node, base_FD=leaf, side_FA=None, core_AD=None) if is_adapted(node) else leaf
        ),
        specs,
        params,
        is_leaf=lambda node: is_spec(node) or is_adapted(node),
    )
    return combine(factors, frame)


def new_adapters(
    params: Any, specs: Any, layout: Layout, dtype: jnp.dtype, *, key: jax.Array
) -> Any:
    """Base weights with fresh adapters where `specs` (of `adapted_specs`) have them."""
    wanted, _ = split(specs, is_adapter(specs))
    return attach(params, specs, init_params(wanted, layout, dtype, key=key))


def int8_paths(specs: Any) -> frozenset[str]:
    """The matrices that `specs` (of `adapted_specs`) declare in int8, by their paths in a
    decoder.
    """
    nodes = jax.tree.leaves_with_path(specs, is_leaf=is_quantized)
    paths = (
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, node in nodes
        if is_quantized(node)
    )
    return frozenset(path.removeprefix("body.").removesuffix(".base_FD") for path in paths)


def adapters_in(params: Any) -> Iterator[tuple[str, Adapted[Any]]]:
    """Every matrix with an adapter, by the path of its leaf in a decoder."""
    for key_path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_adapted):
        if is_adapted(leaf):
            path = jax.tree_util.keystr(key_path, simple=True, separator=".")
            yield path.removeprefix("body."), leaf
