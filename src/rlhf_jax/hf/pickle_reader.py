"""`pytorch_model.bin` without PyTorch: a zip archive of a pickle and raw storages.

The unpickler is restricted to the handful of names that a state dict needs; anything else is an
error that names it, so a file cannot run code. Storages stay in the file and are mapped.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_jax.hf.tensors import StoredTensor, contiguous_strides

STORAGES: Mapping[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a zip entry: signature, then the lengths of name and extra field, which data follows."""


@dataclass(frozen=True)
class StorageType:
    """What stands for `torch.FloatStorage` and its like."""

    dtype: np.dtype


@dataclass(frozen=True)
class Storage:
    """An array in the archive, `data/<key>`, of `size` elements."""

    dtype: np.dtype
    key: str
    size: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as the pickle has it: a view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def rebuild_tensor(storage: Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Any:
    """What `torch._utils._rebuild_tensor_v2` does; gradient flags and hooks mean nothing here."""
    return PickledTensor(storage, offset, tuple(shape), tuple(strides))


def rebuild_parameter(tensor: Any, *_: Any) -> Any:
    """What `torch._utils._rebuild_parameter` does."""
    return tensor


ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGES.items()},
}


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves the names in `ALLOWED` and nothing else."""

    def __init__(self, data: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(data))
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object of this name, or ValueError."""
        if (module, name) not in ALLOWED:
            raise ValueError(
                f"{self.file}: the pickle names {module}.{name}, which a state dict does not "
                "need: it is not read. Save the weights as safetensors (save_pretrained) instead"
            )
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        """A reference to a storage, `("storage", type, key, device, size)`."""
        try:
            kind, storage_type, key, _, size = pid
            if kind != "storage" or not isinstance(storage_type, StorageType):
                raise TypeError
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: {pid!r} is not a reference to a storage") from error
        return Storage(storage_type.dtype, str(key), int(size))


def read_pickle(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a `.bin` file; ValueError where it is damaged or not a state dict."""
    if not zipfile.is_zipfile(file):
        raise ValueError(
            f"{file} is not a zip archive: it is truncated, or in PyTorch's format from before "
            "version 1.6. Load and save it again with transformers (save_pretrained)"
        )
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if "data.pkl" not in entries:
            raise ValueError(f"{file} has no data.pkl: it was not written by torch.save")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError(f"{file} is not little endian: save it again as safetensors")
        state = load_state(archive.read(entries["data.pkl"]), file)
    with file.open("rb") as stream:
        starts = {key: (entry, data_start(stream, entry)) for key, entry in entries.items()}
    return {name: locate(name, tensor, file, starts) for name, tensor in state.items()}


def load_state(data: bytes, file: Path) -> dict[str, PickledTensor]:
    """The state dict that a pickle holds; ValueError for anything else."""
    try:
        state = RestrictedUnpickler(data, file).load()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: data.pkl cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not a dict of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, PickledTensor):
            raise ValueError(
                f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor: "
                "save the model's state dict alone"
            )
    return dict(state)


def data_start(stream: io.BufferedReader, entry: zipfile.ZipInfo) -> int:
    """The byte where an entry's data begins (the local header's extra field differs)."""
    stream.seek(entry.header_offset)
    _, name_length, extra_length = LOCAL_HEADER.unpack(stream.read(LOCAL_HEADER.size))
    return entry.header_offset + LOCAL_HEADER.size + name_length + extra_length


def locate(
    name: str, tensor: PickledTensor, file: Path, starts: Mapping[str, tuple[zipfile.ZipInfo, int]]
) -> StoredTensor:
    """A pickled tensor's place in the file, checked against its storage."""
    storage, dtype = tensor.storage, tensor.storage.dtype
    found = starts.get(f"data/{storage.key}")
    if found is None:
        raise ValueError(f"{file}: the data of {name} (storage {storage.key}) is missing")
    entry, start = found
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{file} is compressed: save it again with torch.save or as safetensors")
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"{file}: {name} has a damaged shape {tensor.shape} {tensor.strides}")
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((n - 1) * step for n, step in pairs)
    if 0 not in tensor.shape and (last + 1) * dtype.itemsize > entry.file_size:
        raise ValueError(
            f"{file}: {name} of shape {list(tensor.shape)} ends at element {last + 1} of its "
            f"storage, which has {entry.file_size // dtype.itemsize}: the file is damaged"
        )
    plain = tensor.strides == contiguous_strides(tensor.shape)
    offset = start + tensor.offset * dtype.itemsize
    return StoredTensor(file, dtype, tensor.shape, offset, None if plain else tensor.strides)
