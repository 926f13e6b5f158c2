"""Tensors of a GGUF file, dequantised by the `gguf` package where and when they are sliced."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_jax.hf.tensors import StoredTensor

PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
SUPPORTED = (*PLAIN, *QUANTIZED)


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor `[rows, columns]` or `[rows]` of type `kind`; its blocks run along the last
    dimension. `num_heads` > 0: its rows are in llama.cpp's order, see `interleaved_rows`.
    """

    kind: str = "F32"
    num_heads: int = 0

    def view(self) -> Any:
        """What a slice is taken of: rows first, then columns."""
        return GGUFView(self)

    def read(self, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Rows by number, columns from `start` to `stop`."""
        if self.num_heads:
            rows = interleaved_rows(self.shape[0], self.num_heads)[rows]
        if self.kind in PLAIN:
            return StoredTensor(self.file, self.dtype, self.shape, self.offset).view()[rows][
                ..., columns
            ]
        from gguf import dequantize
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType[self.kind]
        block, size = GGML_QUANT_SIZES[kind]
        stored = StoredTensor(
            self.file,
            np.dtype(np.uint8),
            (*self.shape[:-1], self.shape[-1] // block * size),
            self.offset,
        ).view()
        first, last = columns.start // block, -(-columns.stop // block)
        values = dequantize(np.ascontiguousarray(stored[rows, first * size : last * size]), kind)
        return values[:, columns.start - first * block : columns.stop - first * block]


class GGUFView:
    """A tensor that is read when it is sliced: `view[rows]` or `view[rows, columns]`."""

    def __init__(self, tensor: GGUFTensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape

    def __getitem__(self, where: slice | tuple[slice, ...]) -> np.ndarray:
        where = where if isinstance(where, tuple) else (where,)
        numbers = np.arange(self.shape[0])[where[0]]
        whole = slice(None) if len(where) == 1 else where[1]
        columns = slice(*whole.indices(self.shape[-1])[:2])
        return self.tensor.read(numbers, columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole tensor."""
        del copy
        whole = self[slice(None)]
        return whole if dtype is None else whole.astype(dtype)


def interleaved_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Row n of a query or key matrix of Hugging Face is row `interleaved_rows[n]` of llama.cpp.

    llama.cpp rotates neighbouring rows of a head, Hugging Face rows that lie half a head apart.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
