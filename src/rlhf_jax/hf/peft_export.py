"""PEFT's adapter directories, written: what was trained beside a base model that is only named.

Where more than adapters trained, the other modules are there whole (`modules_to_save`), and so are
the biases of modules with an adapter (`bias`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_jax.hf.config_io import write_json
from rlhf_jax.hf.export import DtypeName, host_tensors, narrow, staged, to_host
from rlhf_jax.hf.peft import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from rlhf_jax.hf.pieces import LM_HEAD, Leaf, embedding_name, plan_leaves
from rlhf_jax.hf.safetensors_io import write_file
from rlhf_jax.hf.tensors import FLOAT_DTYPES, StoredTensor
from rlhf_jax.models.adapted import Adapted, is_adapted
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.lora import LoRAConfig, linear_modules
from rlhf_jax.models.params import param_specs, scalar_specs


@dataclass(frozen=True)
class Group:
    """Tensors that come to the host together when they are written: their shapes by name."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]


def save_adapter(
    directory: Path,
    trained: Any,
    cfg: ModelConfig,
    dtype: DtypeName,
    lora: LoRAConfig,
    base: str,
    *,
    scalar: bool = False,
    carried: Mapping[str, StoredTensor] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """What was trained (a tree with None for the rest) as an adapter of the model `base`.

    `carried` are whole tensors of the adapter that training went on from. Every process calls
    this; the first one writes.
    """
    groups = list(trained_groups(trained, cfg, FLOAT_DTYPES[dtype], scalar=scalar))
    written = {name for group in groups for name in group.shapes}
    kept = {name: t for name, t in (carried or {}).items() if name not in written}
    if cfg.tie_embeddings and not scalar and (table := kept.get(embedding_name(cfg))) is not None:
        kept.setdefault(LM_HEAD, table)
    groups += [held({name: np.asarray(t.view())}) for name, t in kept.items()]
    shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
    names, config = peft_names(shapes, cfg, lora, base, scalar=scalar)
    kind = FLOAT_DTYPES[dtype]
    tensors = (
        (names[name], narrow(array, kind, name)) for group in groups for name, array in group.read()
    )
    with staged(directory) as stage:
        if stage is None:
            for _ in tensors:  # the other processes still take part in bringing leaves together
                pass
        else:
            entries = {names[name]: (kind, shape) for name, shape in shapes.items()}
            write_file(stage / WEIGHTS_FILE, entries, tensors)
            write_json(stage / CONFIG_FILE, config)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(stage))


def trained_groups(
    trained: Any, cfg: ModelConfig, kind: np.dtype, *, scalar: bool
) -> Iterator[Group]:
    """What was trained, leaf by leaf; factors are held, whole tensors read when they are written.

    PEFT trains a copy of the embedding, so what is tied to it is there on its own.
    """
    specs = scalar_specs(cfg) if scalar else param_specs(cfg)
    prefix, modules = find_family(cfg.family).body_prefixes[0], linear_modules(cfg)
    leaves = {leaf.path: leaf for leaf in plan_leaves(specs, cfg, prefix)}
    for key_path, node in jax.tree.leaves_with_path(trained, is_leaf=is_adapted):
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        leaf = leaves[path]
        if is_adapted(node):
            yield held(dict(factor_tensors(leaf, node, modules[path.removeprefix("body.")])))
            continue
        yield Group(leaf.tensor_shapes(), partial(host_tensors, [leaf], node, kind))
        if path == "embed_VW" and cfg.tie_embeddings:
            (shape,) = leaf.tensor_shapes().values()
            yield Group({LM_HEAD: shape}, partial(tied_head, leaf, node, kind))


def held(arrays: Mapping[str, np.ndarray]) -> Group:
    """A group of arrays that are on the host."""
    return Group(
        {name: array.shape for name, array in arrays.items()}, lambda: iter(arrays.items())
    )


def tied_head(leaf: Leaf, node: jax.Array, kind: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """The embedding under the name of what is tied to it."""
    return ((LM_HEAD, array) for _, array in host_tensors([leaf], node, kind))


def factor_tensors(
    leaf: Leaf, weight: Adapted[jax.Array], modules: tuple[str, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """`lora_A` and `lora_B` of every module of a leaf that has any."""
    side, core = (to_host(factor).astype(np.float32) for factor in (weight.side_FA, weight.core_AD))
    ranks, first = weight.ranks or (core.shape[0],), 0
    for module, rank in zip(modules, ranks, strict=True):
        columns = slice(first, first + rank)
        first += rank
        if rank == 0:
            continue
        pieces = [piece for piece in leaf.pieces if piece.tensor == f"{module}.weight"]
        held = np.concatenate([side[p.row : p.row + p.num_rows, columns] for p in pieces])
        low, high = core[columns], held
        if pieces[0].transposed:
            low, high = held.T, core[columns].T
        yield f"{module}.lora_A.weight", np.ascontiguousarray(low)
        yield f"{module}.lora_B.weight", np.ascontiguousarray(high)


def peft_names(
    shapes: Iterable[str], cfg: ModelConfig, lora: LoRAConfig, base: str, *, scalar: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """What PEFT calls each tensor, and adapter_config.json."""
    every, factor = set(shapes), ".lora_A.weight"
    modules = [name.removesuffix(factor) for name in shapes if name.endswith(factor)]
    adapted, saved, biases = set(modules), dict[str, None](), False
    names = {}
    for name in shapes:
        module, _, kind = name.rpartition(".")
        names[name] = PREFIX + name
        if ".lora_" in name:
            continue
        if module in adapted:
            names[name] = f"{PREFIX}{module}.base_layer.{kind}"
        # A key's weight stays as it is where only its query has an adapter; its bias trains.
        if module in adapted or f"{module}.weight" not in every:
            biases = True
        else:
            saved[module] = None
    everything = [name for names in linear_modules(cfg).values() for name in names]
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.dim,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": short_names(modules, everything),
        "modules_to_save": list(saved) or None,
        "bias": "all" if biases else "none",
        "inference_mode": True,
        "fan_in_fan_out": False,
    }
    return names, config


def short_names(chosen: list[str], everything: list[str]) -> list[str]:
    """Names of modules by their last part, where it stands for chosen ones alone."""
    names: dict[str, None] = {}
    for module in chosen:
        last = module.rpartition(".")[2]
        alike = {name for name in everything if name.endswith(f".{last}")}
        names[last if alike <= set(chosen) else module] = None
    return list(names)
