"""What one parameter is: shape, logical axes and initialiser, declared once."""

from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

LogicalAxis = Literal["vocab", "qkv", "heads", "mlp", "width"] | None


class Initializer(Protocol):
    """Initial values by key, shape and dtype. Equal initialisers compile once."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """The values."""
        ...


@dataclass(frozen=True)
class Normal:
    """Values from a normal distribution of mean 0."""

    stddev: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (self.stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        del key
        return jnp.full(shape, self.value, dtype)


@dataclass(frozen=True)
class Uniform:
    """Values between -bound and bound."""

    bound: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        values = jax.random.uniform(key, shape, jnp.float32, -self.bound, self.bound)
        return values.astype(dtype)


@dataclass(frozen=True)
class Sinusoids:
    """Rows of sines and cosines of falling frequency; row `offset` is position 0."""

    stddev: float
    offset: int

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        del key
        rows, width = shape
        position = (jnp.arange(rows) - self.offset)[:, None]
        frequency = 10000.0 ** (-jnp.arange(width // 2) * 2.0 / width)[None, :]
        angle = position * frequency
        waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
        return (self.stddev * 2**0.5 * waves).astype(dtype)


@dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes (one per dimension) and initialiser of a parameter.

    `decay` says whether weight decay applies (matrices yes, biases and norms no). `rows` is the
    number of real rows: what the first dimension has beyond it is padding, and zero. `dtype` is its
    own, None: that of the model.
    """

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    init: Initializer
    decay: bool = True
    rows: int | None = None
    dtype: Literal["int8", "float32"] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    def initialize(self, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Initial values of the real rows, zeros in the padding."""
        value = self.init(key, self.shape, dtype)
        if self.rows is None or self.rows == self.shape[0]:
            return value
        row = jnp.arange(self.shape[0]).reshape(-1, *[1] * (len(self.shape) - 1))
        return jnp.where(row < self.rows, value, jnp.zeros((), dtype))
