"""The safetensors format, read as memory maps and written one tensor at a time.

A file is the header's length (8 bytes, little endian), the header (JSON: dtype, shape and offsets
of every tensor) and the data. The format's own NumPy interface knows no bfloat16.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_jax.hf.tensors import StoredTensor

MAX_HEADER = 100_000_000
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file; ValueError where the file is damaged, with file and tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise ValueError(f"{file} is a pointer of Git LFS, not the weights: run git lfs pull")
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{file} is not a safetensors file, or its header is cut off")
        header = parse_header(stream.read(length), file)
    header.pop("__metadata__", None)
    return {name: locate(name, entry, file, 8 + length, size) for name, entry in header.items()}


def parse_header(data: bytes, file: Path) -> dict[str, Any]:
    """The header as JSON; ValueError where a name is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{file}: {', '.join(twice)} is there twice")
        return dict(pairs)

    try:
        header = json.loads(data, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: the safetensors header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is not a JSON object")
    return header


def locate(name: str, entry: Any, file: Path, start: int, size: int) -> StoredTensor:
    """One entry of the header, checked against the file's size."""
    try:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{file}: the entry of {name} is damaged: {entry}") from error
    if kind not in DTYPES:
        raise ValueError(
            f"{file}: {name} has dtype {kind}, which cannot be read: use {', '.join(DTYPES)}"
        )
    dtype = DTYPES[kind]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{file}: the entry of {name} is damaged: {entry}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{file}: {name} of shape {list(shape)} and dtype {kind} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, its offsets {first}..{last} span "
            f"{last - first}"
        )
    if start + last > size:
        raise ValueError(
            f"{file} is truncated: {name} ends at byte {start + last}, the file has {size}: "
            "copy or download it again"
        )
    return StoredTensor(file, dtype, shape, start + first)


def write_file(
    file: Path,
    entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write `tensors`, which come in the order of `entries` (dtype and shape by name)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    with file.open("wb") as stream:
        stream.write(len(data).to_bytes(8, "little"))
        stream.write(data)
        for (name, array), (expected, (dtype, shape)) in zip(tensors, entries.items(), strict=True):
            assert (name, array.dtype, array.shape) == (expected, dtype, shape)
            stream.write(as_bytes(array))


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in row-major order, without a copy where it is contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def split_shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in runs of at most `limit` bytes (a larger tensor has its own)."""
    shard: list[str] = []
    total = 0
    for name, size in sizes.items():
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += size
    if shard:
        yield shard
