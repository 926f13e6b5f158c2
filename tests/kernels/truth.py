"""The kernels' results in NumPy float64, row by row and head by head, and the tolerances."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.row_digits import RowDigits

# A GPU's tensor cores round float32 operands to TF32, with 10 bits behind the point.
FLOAT32 = 5e-3 if jax.default_backend() == "gpu" else 2e-5
# Largest error allowed, relative and absolute, by the dtype of the arrays.
TOLERANCE = {"float32": FLOAT32, "bfloat16": 2e-2, "float16": 4e-3}


def assert_close(got: jax.Array, want: np.ndarray, dtype: str, scale: float = 1.0) -> None:
    """Checks an array against its float64 truth at `scale` times the dtype's tolerance."""
    tolerance = TOLERANCE[dtype] * scale
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Standard normal numbers rounded to `dtype`."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype=jnp.dtype(dtype))


def one_query(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q . keys / sqrt(K)) . values for one query [K] and the keys [n, K] it sees."""
    scores = keys @ q / np.sqrt(q.size)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def attention(q_BTHK, k_BTGK, v_BTGK, window: int | None, starts_T=None) -> np.ndarray:
    """Causal grouped-query attention: query i sees keys max(start_i, i - window + 1)..i."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTHK, k_BTGK, v_BTGK))
    B, T, H, _ = q.shape
    per_group = H // k.shape[2]
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(B, T, H):
        start = 0 if starts_T is None else starts_T[i]
        seen = slice(start if window is None else max(start, i - window + 1), i + 1)
        g = h // per_group
        out[b, i, h] = one_query(q[b, i, h], k[b, seen, g], v[b, seen, g])
    return out


def turn(x_BHK, angle_BI) -> np.ndarray:
    """Heads whose lanes i and i + K/2 are one complex number, turned by the row's angle i."""
    x = np.asarray(x_BHK, np.float64)
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle_BI)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def decode(q_BHK, k_BGK, v_BGK, positions, k_cache_BGSK, v_cache_BGSK, window: int | None):
    """(out, k cache, v cache); the output of a row outside the cache stays zero."""
    q = np.asarray(q_BHK, np.float64)
    k_cache, v_cache = (np.array(x, np.float64) for x in (k_cache_BGSK, v_cache_BGSK))
    S = k_cache.shape[2]
    per_group = q.shape[1] // k_cache.shape[1]
    out = np.zeros(q.shape)
    for b, position in enumerate(positions):
        if not 0 <= position < S:
            continue
        k_cache[b, :, position] = np.asarray(k_BGK, np.float64)[b]
        v_cache[b, :, position] = np.asarray(v_BGK, np.float64)[b]
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        for h in range(q.shape[1]):
            g = h // per_group
            out[b, h] = one_query(q[b, h], k_cache[b, g, seen], v_cache[b, g, seen])
    return out, k_cache, v_cache


def token_logprob(hidden_ND, unembed_VD, targets_N, valid_vocab: int, temperature: float):
    """(logprob, entropy) one token at a time over the real columns."""
    hidden, unembed = np.asarray(hidden_ND, np.float64), np.asarray(unembed_VD, np.float64)
    logprobs, entropies = [], []
    for row, target in zip(hidden, np.asarray(targets_N), strict=True):
        logits = unembed[:valid_vocab] @ row / temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        logprobs.append(np.log(p[target]))
        entropies.append(-np.sum(p * np.log(p)))
    return np.array(logprobs), np.array(entropies)


def product_up(x_MD, w_FD, bias_F, gate_FD, activation: str | None) -> np.ndarray:
    """activation(w x + bias), or silu(gate x) times it, one row and one output at a time."""
    x, w = np.asarray(x_MD, np.float64), np.asarray(w_FD, np.float64)
    out = np.zeros((len(x), len(w)))
    for m, f in np.ndindex(out.shape):
        y = w[f] @ x[m] + (0.0 if bias_F is None else float(bias_F[f]))
        if gate_FD is not None:
            gate = np.asarray(gate_FD[f], np.float64) @ x[m]
            y = y * gate / (1.0 + math.exp(-gate))
        elif activation == "relu":
            y = max(y, 0.0)
        out[m, f] = y
    return out


def add_norm(x_MD, parts_JMD, bias_D, scale_D, shift_D, eps: float):
    """(sum, norm) row by row; without `shift_D` the mean is not taken away."""
    totals, norms = [], []
    for x, parts in zip(
        np.asarray(x_MD, np.float64), np.asarray(parts_JMD, np.float64).swapaxes(0, 1), strict=True
    ):
        total = x + parts.sum(0) + (0.0 if bias_D is None else np.asarray(bias_D, np.float64))
        mean = 0.0 if shift_D is None else total.mean()
        norm = (total - mean) / np.sqrt(np.mean((total - mean) ** 2) + eps)
        norm = norm * np.asarray(scale_D, np.float64)
        totals.append(total)
        norms.append(norm + (0.0 if shift_D is None else np.asarray(shift_D, np.float64)))
    return np.array(totals), np.array(norms)


def numbers(digits: RowDigits) -> np.ndarray:
    """The rows that digits stand for."""
    high, low = np.moveaxis(np.asarray(digits.digits, np.float64), 1, 0)
    M, C = digits.rows.shape
    return (128 * high + low).reshape(-1, C)[:M] * np.asarray(digits.scale, np.float64)[:M, None]


def central_difference(function, x: np.ndarray, direction: np.ndarray, step: float = 1e-5) -> float:
    """Derivative of a float64 function at x along `direction`."""
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)
