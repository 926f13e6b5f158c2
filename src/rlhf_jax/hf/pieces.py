"""From the tables of `models.families` to pieces: which rows of a leaf are which of a tensor.

Loading and exporting are both this list: loading cuts a shard out of the tensors, exporting cuts
the tensors out of a leaf.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from meshes.spec import ParamSpec
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import find_family
from rlhf_jax.models.hf_table import Columns, Family, Groups, Rows, Source
from rlhf_jax.models.params import is_spec

SCORE_HEAD, VALUE_HEAD = "score.weight", "v_head.weight"
HEADS = (SCORE_HEAD, VALUE_HEAD)
"""The scalar head of transformers' sequence classifiers, and of DeepSpeed-Chat's RewardModel."""
LM_HEAD = "lm_head.weight"
"""The unembedding, where a checkpoint has one beside the embedding."""


@dataclass(frozen=True)
class Piece:
    """`num_rows` rows of a leaf from `row` on are those of a tensor from `tensor_row` on.

    Where `transposed`, the tensor's columns are meant.
    """

    tensor: str
    row: int
    tensor_row: int
    num_rows: int
    transposed: bool


@dataclass(frozen=True)
class Leaf:
    """A parameter and the pieces of it; rows that no piece covers are padding, and zero."""

    path: str
    spec: ParamSpec
    pieces: tuple[Piece, ...]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor that this leaf is made of."""
        rows: dict[str, int] = {}
        for piece in self.pieces:
            rows[piece.tensor] = rows.get(piece.tensor, 0) + piece.num_rows
        width = self.spec.shape[1:]
        transposed = self.pieces[0].transposed
        # A vector that is a transposed tensor is a matrix of one row: a scalar head.
        return {
            name: ((*(width or (1,)), count) if transposed else (count, *width))
            for name, count in rows.items()
        }


def plan_leaves(specs: Any, cfg: ModelConfig, prefix: str, head: str = SCORE_HEAD) -> list[Leaf]:
    """The leaves of `Params` or `ScalarModel` specs in tree order.

    `prefix` is what the body's tensor names begin with; `head` names the scalar head's tensor.
    """
    family = find_family(cfg.family)
    leaves = []
    for key_path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec):
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        source = Columns(head) if path == "head_W" else find_source(family, path)
        leaves.append(Leaf(path, spec, tuple(rename(cut(source, spec, cfg), family, prefix))))
    return leaves


def find_source(family: Family, path: str) -> Source:
    """The table's row for a leaf, with the number of its layer filled in."""
    inside = path.removeprefix("body.")
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", inside)
    if found is None:
        return family.table[inside]
    source = family.table[f"layers.*.{found[2]}"]
    names = {field: name.format(n=found[1]) for field, name in vars(source).items()}
    return type(source)(**names)


def cut(source: Source, spec: ParamSpec, cfg: ModelConfig) -> Iterable[Piece]:
    """The pieces of one leaf."""
    if not isinstance(source, Groups):
        rows = spec.shape[0] if spec.rows is None else spec.rows
        yield Piece(source.tensor, 0, 0, rows, isinstance(source, Columns))
        return
    query, head = cfg.heads_per_group * cfg.head_size, cfg.head_size
    row = 0
    for group in range(cfg.num_kv_heads):
        for tensor, size in ((source.query, query), (source.key, head), (source.value, head)):
            yield Piece(tensor, row, group * size, size, False)
            row += size


def rename(pieces: Iterable[Piece], family: Family, prefix: str) -> Iterable[Piece]:
    """Pieces whose tensors of the body begin with `prefix`."""
    usual = family.body_prefixes[0]
    for piece in pieces:
        name = piece.tensor
        if name.startswith(usual):
            name = prefix + name.removeprefix(usual)
        yield Piece(name, piece.row, piece.tensor_row, piece.num_rows, piece.transposed)


def find_prefix(family: Family, names: Iterable[str]) -> str:
    """What the body's tensor names begin with; the causal model's where nothing fits."""
    source = family.table["embed_VW"]
    assert isinstance(source, Rows)
    embedding = source.tensor.removeprefix(family.body_prefixes[0])
    names = set(names)
    fitting = [prefix for prefix in family.body_prefixes if prefix + embedding in names]
    return fitting[0] if fitting else family.body_prefixes[0]


def all_shapes(leaves: Iterable[Leaf]) -> Mapping[str, tuple[int, ...]]:
    """Every tensor of a model and its shape, in the order of the leaves."""
    return {name: shape for leaf in leaves for name, shape in leaf.tensor_shapes().items()}


def embedding_name(cfg: ModelConfig, prefix: str | None = None) -> str:
    """The name of the embedding's tensor: behind `prefix`, or the family's usual one."""
    family = find_family(cfg.family)
    source, usual = family.table["embed_VW"], family.body_prefixes[0]
    assert isinstance(source, Rows)
    return (usual if prefix is None else prefix) + source.tensor.removeprefix(usual)
