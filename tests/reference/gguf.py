"""How ggml's blocks stand for numbers, element by element (ggml-quants.c, `dequantize_row_*`)."""

import numpy as np


def half(block: np.ndarray, at: int) -> float:
    """The float16 at a byte."""
    return float(block[at : at + 2].copy().view(np.float16)[0])


def q8_0(block: np.ndarray) -> list[float]:
    """34 bytes: a scale and 32 signed bytes."""
    scale = half(block, 0)
    return [scale * int(x) for x in block[2:].view(np.int8)]


def q4_0(block: np.ndarray) -> list[float]:
    """18 bytes: a scale; the low halves of 16 bytes, then the high ones, less 8."""
    scale, codes = half(block, 0), [int(x) for x in block[2:]]
    return [scale * (x % 16 - 8) for x in codes] + [scale * (x // 16 - 8) for x in codes]


def q4_1(block: np.ndarray) -> list[float]:
    """20 bytes: a scale, a minimum, and the codes of q4_0."""
    scale, least, codes = half(block, 0), half(block, 2), [int(x) for x in block[4:]]
    return [scale * (x % 16) + least for x in codes] + [scale * (x // 16) + least for x in codes]


def q4_k(block: np.ndarray) -> list[float]:
    """144 bytes: scales of scales and minima; 8 parts of 32 codes with 6 bits of each."""
    scale, least = half(block, 0), half(block, 2)
    packed, codes = [int(x) for x in block[4:16]], [int(x) for x in block[16:]]
    values: list[float] = []
    for part in range(8):
        if part < 4:
            a, b = packed[part] % 64, packed[part + 4] % 64
        else:
            a = packed[part + 4] % 16 + packed[part - 4] // 64 * 16
            b = packed[part + 4] // 16 + packed[part] // 64 * 16
        run = codes[part // 2 * 32 : part // 2 * 32 + 32]
        values += [scale * a * (x // 16 if part % 2 else x % 16) - least * b for x in run]
    return values


def q6_k(block: np.ndarray) -> list[float]:
    """210 bytes: low 4 bits, high 2 bits, a signed scale for every 16 values, a scale of these."""
    low, high = [int(x) for x in block[:128]], [int(x) for x in block[128:192]]
    scales, scale = [int(x) for x in block[192:208].view(np.int8)], half(block, 208)
    values: list[float] = []
    for n in range(256):
        whole, inside = divmod(n, 128)
        quarter, place = divmod(inside, 32)
        byte = low[whole * 64 + quarter % 2 * 32 + place]
        nibble = byte // 16 if quarter >= 2 else byte % 16
        bits = high[whole * 32 + place] // 4**quarter % 4
        values.append(scale * scales[n // 16] * (nibble + 16 * bits - 32))
    return values


BLOCKS = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
}
"""Bytes of a block, and the values in it."""


def dequantized(stored: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of a matrix of bytes."""
    size, read = BLOCKS[kind]
    rows = [
        [value for block in row.reshape(-1, size) for value in read(block)]
        for row in stored.reshape(len(stored), -1)
    ]
    return np.array(rows, np.float32)
