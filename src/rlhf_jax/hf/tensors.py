"""`StoredTensor`: where a tensor of a checkpoint lies in a file, read slice by slice."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that can be mapped into memory.

    `offset` is the first element's byte in the file; `strides` count elements and None means
    contiguous.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor mapped read-only: nothing is read before it is sliced."""
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True))
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        flat = np.memmap(self.file, self.dtype, "r", self.offset, (span,))
        steps = tuple(step * self.dtype.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
