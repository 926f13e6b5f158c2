"""PEFT's adapter directories, read: adapter_config.json and adapter_model.safetensors.

An adapter names its base model. Beside the factors (`lora_A`, `lora_B`) it may hold whole tensors
that were trained with them (`modules_to_save`, `bias`): they stand in for the base's own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import Layout
from rlhf_jax.hf.checkpoint import shorten
from rlhf_jax.hf.config_io import read_json
from rlhf_jax.hf.pickle_reader import read_pickle
from rlhf_jax.hf.pieces import HEADS, LM_HEAD, Leaf, all_shapes, embedding_name, plan_leaves
from rlhf_jax.hf.safetensors_io import read_header
from rlhf_jax.hf.tensors import StoredTensor
from rlhf_jax.models.adapted import Adapted
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.lora import linear_modules
from rlhf_jax.models.params import param_specs, scalar_specs
from rlhf_jax.models.quantized import is_quantized

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
PREFIX = "base_model.model."
"""What PEFT puts in front of every tensor's name."""
copy = jax.jit(jnp.copy)

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # base as it is
}
"""Keys of adapter_config.json by which a LoRA is another one, and what they must be."""


@dataclass(frozen=True)
class Adapter:
    """An adapter directory: its config and its tensors, named as those of the base model."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def base(self) -> str:
        """The base model's name."""
        return self.config["base_model_name_or_path"]

    @property
    def whole(self) -> dict[str, StoredTensor]:
        """Tensors that stand in for those of the base model."""
        kept = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self.tensors.items()
            if ".lora_" not in name and ".original_module." not in name
        }
        # With bias="all" PEFT writes the biases of modules_to_save under both of their names.
        return {name.replace(".modules_to_save.", "."): kept[name] for name in sorted(kept)}

    def rank(self, module: str) -> int:
        """The rank of a module's factors, 0 where it has none."""
        factor = self.tensors.get(f"{module}.lora_A.weight")
        return 0 if factor is None else factor.shape[0]

    def scale(self, module: str) -> float:
        """What the product of a module's factors counts."""
        alpha = self.config.get("lora_alpha", 8)
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        rank = self.rank(module)
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)


def is_adapter_directory(path: Path) -> bool:
    """Whether a directory holds an adapter, and no model beside it."""
    models = [*path.glob("model*.safetensors"), *path.glob("pytorch_model*.bin")]
    return (path / CONFIG_FILE).is_file() and not models


def open_adapter(directory: Path) -> Adapter:
    """The adapter in a directory; nothing but headers is read.

    ValueError or FileNotFoundError where it is none that can be read, with what it would take.
    """
    config = read_json(directory / CONFIG_FILE)
    for key, allowed in PLAIN.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"{directory / CONFIG_FILE}: {key}={config[key]!r} is not supported, only "
                f"{' or '.join(map(repr, allowed))}"
            )
    if not config.get("base_model_name_or_path"):
        raise ValueError(
            f"{directory / CONFIG_FILE} names no base_model_name_or_path: write there the "
            "directory or Hub name of the model that the adapter was trained on"
        )
    for name, read in ((WEIGHTS_FILE, read_header), (PICKLE_FILE, read_pickle)):
        if (directory / name).is_file():
            tensors = read(directory / name)
            break
    else:
        raise FileNotFoundError(f"{directory} has no {WEIGHTS_FILE}: it is not an adapter")
    other = [name for name in tensors if not name.startswith(PREFIX)]
    if other:
        raise ValueError(
            f"{directory}: names of tensors begin with {PREFIX!r}, not {shorten(other)}"
        )
    return Adapter(
        directory, config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    )


def check_fits(adapter: Adapter, cfg: ModelConfig, base: str) -> None:
    """ValueError where an adapter has tensors that its base model has no place for, naming both."""
    expected: dict[str, tuple[int, ...]] = dict(module_shapes(cfg, adapter))
    missing = [name for name in expected if name not in adapter.tensors]
    missing += [f"{m}.lora_A.weight" for m in targeted(adapter, cfg) if not adapter.rank(m)]
    specs = scalar_specs(cfg)
    prefix = find_family(cfg.family).body_prefixes[0]
    expected |= all_shapes(plan_leaves(specs, cfg, prefix))
    found = {name: t for name, t in adapter.tensors.items() if ".lora_" in name} | adapter.whole
    if cfg.tie_embeddings:
        check_tied(adapter, cfg, found)
        found.pop(LM_HEAD, None)
    unknown = [name for name in found if name not in expected]
    wrong = [
        f"{name} has shape {list(tensor.shape)}, the base needs {list(expected[name])}"
        for name, tensor in found.items()
        if name in expected and tensor.shape != expected[name]
    ]
    lines = [f"no such module: {shorten(unknown)}"] if unknown else []
    lines += [f"misshapen: {shorten(wrong)}"] if wrong else []
    lines += [f"missing: {shorten(missing)}"] if missing else []
    if lines:
        raise ValueError(
            f"the adapter {adapter.directory} does not fit its base model {base}\n  "
            + "\n  ".join(lines)
        )


def targeted(adapter: Adapter, cfg: ModelConfig) -> list[str]:
    """The modules of the base that an adapter's config says have factors, by PEFT's rule for a list
    of names; none where it is a pattern, or leaves some out.
    """
    names = adapter.config.get("target_modules")
    partial = ("layers_to_transform", "layers_pattern", "exclude_modules")
    if not isinstance(names, list) or any(adapter.config.get(key) for key in partial):
        return []
    modules = [module for _, pieces in linear_leaves(cfg) for module in pieces]
    return [m for m in modules if any(m == n or m.endswith(f".{n}") for n in names)]


def module_shapes(cfg: ModelConfig, adapter: Adapter) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of the factors of every module that has any, by the tensor's name."""
    for leaf, modules in linear_leaves(cfg):
        shapes = leaf.tensor_shapes()
        for module in modules:
            rank, (out, inside) = adapter.rank(module), shapes[f"{module}.weight"]
            if rank:
                yield f"{module}.lora_A.weight", (rank, inside)
                yield f"{module}.lora_B.weight", (out, rank)


def linear_leaves(cfg: ModelConfig) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
    """Every leaf that may have an adapter, with its pieces and its modules."""
    modules = linear_modules(cfg)
    prefix = find_family(cfg.family).body_prefixes[0]
    for leaf in plan_leaves(param_specs(cfg), cfg, prefix):
        if leaf.path in modules:
            yield leaf, modules[leaf.path]


def check_tied(adapter: Adapter, cfg: ModelConfig, found: Mapping[str, StoredTensor]) -> None:
    """ValueError where an adapter unties the embeddings of a model that has them tied."""
    head, tied = found.get(LM_HEAD), found.get(embedding_name(cfg))
    if head is not None and (tied is None or not np.array_equal(head.view(), tied.view())):
        raise ValueError(
            f"{adapter.directory} has a trained lm_head.weight, but {adapter.base} ties it to the "
            "embedding: this adapter cannot be read"
        )
    # PEFT trains a copy of the embedding; the head keeps the base's, unless it is told otherwise.
    alone = tied is not None and head is None and not found.keys() & set(HEADS)
    if alone and not adapter.config.get("ensure_weight_tying"):
        raise ValueError(
            f"{adapter.directory} has a trained embedding and no lm_head.weight, which "
            f"{adapter.base} ties to it: PEFT unties them then (no ensure_weight_tying), so this "
            "adapter cannot be read"
        )


def read_factors(adapter: Adapter, cfg: ModelConfig) -> dict[str, Adapted[Any]]:
    """The factors as NumPy arrays, by the path of the leaf that they belong to."""
    factors: dict[str, Adapted[Any]] = {}
    for leaf, modules in linear_leaves(cfg):
        ranks = tuple(adapter.rank(module) for module in modules)
        if not any(ranks):
            continue
        scales = {adapter.scale(m) for m, rank in zip(modules, ranks, strict=True) if rank}
        scale = max(scales)
        side = np.zeros((leaf.spec.shape[0], sum(ranks)), np.float32)
        core = np.zeros((sum(ranks), leaf.spec.shape[1]), np.float32)
        first = 0
        for module, rank in zip(modules, ranks, strict=True):
            if rank:
                low, high = (
                    np.asarray(adapter.tensors[f"{module}.lora_{x}.weight"].view(), np.float32)
                    for x in "AB"
                )
                high = high * (adapter.scale(module) / scale)
                place(leaf, module, slice(first, first + rank), side, core, low, high)
            first += rank
        query, head = cfg.heads_per_group * cfg.head_size, cfg.head_size
        fused = len(modules) > 1
        factors[leaf.path] = Adapted(
            base_FD=None,
            side_FA=side,
            core_AD=core,
            scale=scale,
            rows=(query, head, head) if fused else (),
            ranks=ranks if fused else (),
        )
    return factors


def place(
    leaf: Leaf,
    module: str,
    columns: slice,
    side: np.ndarray,
    core: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """Puts a module's factors, `lora_A` (`low`) and `lora_B` (`high`), into those of its leaf."""
    for piece in leaf.pieces:
        if piece.tensor != f"{module}.weight":
            continue
        rows = slice(piece.row, piece.row + piece.num_rows)
        stored = slice(piece.tensor_row, piece.tensor_row + piece.num_rows)
        side[rows, columns] = low.T[stored] if piece.transposed else high[stored]
        core[columns] = high.T if piece.transposed else low


def put_factors(
    factors: Mapping[str, Adapted[Any]], params: Any, cfg: ModelConfig, layout: Layout, dtype: Any
) -> Any:
    """A model in `layout` with its adapter beside it, which is put there too."""
    axes = {leaf.path: leaf.spec.axes for leaf, _ in linear_leaves(cfg)}

    def put(array: np.ndarray, *logical: str | None) -> jax.Array:
        array = array.astype(dtype)
        made = jax.make_array_from_callback(
            array.shape, layout.sharding(*logical), lambda index: array[index]
        )
        return copy(made)  # an alias of host memory could not be donated to an update

    def one(key_path: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(key_path, simple=True, separator=".").removeprefix("body.")
        if path not in factors:
            return leaf
        found = factors[path]
        side = put(found.side_FA, axes[path][0], None)
        core = put(found.core_AD, None, "width")
        return replace(found, base_FD=leaf, side_FA=side, core_AD=core)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_quantized)
