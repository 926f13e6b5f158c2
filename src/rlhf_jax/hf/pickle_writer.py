"""A state dict in `torch.save`'s format without PyTorch, for tools that read only that.

The pickle is written by hand: its names are PyTorch's, which is not there to be imported.
"""

import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from rlhf_jax.hf.pickle_reader import STORAGES
from rlhf_jax.hf.safetensors_io import as_bytes
from rlhf_jax.hf.tensors import contiguous_strides

STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}
ORDERED_DICT = b"ccollections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE


def write_pickle(
    file: Path,
    entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write `tensors`, which come in the order of `entries` (dtype and shape by name)."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", state_dict(entries))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for key, ((name, array), expected) in enumerate(zip(tensors, entries, strict=True)):
            assert (name, array.dtype, array.shape) == (expected, *entries[expected])
            with archive.open(f"archive/data/{key}", "w", force_zip64=True) as stream:
                stream.write(as_bytes(array))


def state_dict(entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """The pickle (protocol 2) of an OrderedDict of tensors, each with its own storage."""
    items = b"".join(
        text(name) + tensor(key, dtype, shape)
        for key, (name, (dtype, shape)) in enumerate(entries.items())
    )
    mapping = ORDERED_DICT + pickle.MARK + items + pickle.SETITEMS
    return pickle.PROTO + b"\x02" + mapping + pickle.STOP


def tensor(key: int, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A call of `_rebuild_tensor_v2`: storage, offset, shape, strides, no gradient, no hooks."""
    size = int(np.prod(shape, dtype=np.int64))
    storage_type = f"ctorch\n{STORAGE_NAMES[dtype]}\n".encode()
    reference = sequence(text("storage"), storage_type, text(str(key)), text("cpu"), number(size))
    arguments = sequence(
        reference + pickle.BINPERSID,
        number(0),
        sequence(*map(number, shape)),
        sequence(*map(number, contiguous_strides(shape))),
        pickle.NEWFALSE,
        ORDERED_DICT,
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + pickle.REDUCE


def sequence(*parts: bytes) -> bytes:
    """A tuple."""
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def text(value: str) -> bytes:
    """A string."""
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """An integer."""
    data = pickle.encode_long(value)
    return pickle.LONG1 + struct.pack("<B", len(data)) + data
