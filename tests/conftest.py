"""What every test shares: 8 simulated CPU devices, a compilation cache, tolerances, real data.

The devices are set before any backend starts, so this file imports jax and nothing that runs it.
Tests never use the network. Nearly all of their time is compilation: programs are compiled with few
optimizations (`JAX_DISABLE_MOST_OPTIMIZATIONS=0` asks for all) and kept between runs outside the
checkout (`JAX_COMPILATION_CACHE_DIR` moves them). Commands that tests start inherit all of it.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NUM_DEVICES = 8

# XLA runs all simulated devices on one pool of max(cores, devices) threads, and a device that waits
# in a collective holds one. Independent collectives (one gradient each) then block the pool and
# XLA aborts after 40 s. Its size follows this variable, read when the backend starts.
os.environ.setdefault("NPROC", str(16 * NUM_DEVICES))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_home / "rlhf_jax" / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np
import pytest
from numpy.typing import DTypeLike

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

# Tracing makes many objects that stay: to look for cycles among them at Python's pace takes 4 % of
# the CPU time.
gc.freeze()
gc.set_threshold(50_000)


@dataclass(frozen=True)
class Tolerance:
    """Relative and absolute tolerance in the form `np.testing.assert_allclose(…, **tol.kwargs)`."""

    rtol: float
    atol: float

    @property
    def kwargs(self) -> dict[str, float]:
        return {"rtol": self.rtol, "atol": self.atol}


TOLERANCES = {
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "bfloat16": Tolerance(rtol=2e-2, atol=2e-2),
}
"""For values of order 1 after a few dozen operations of the dtype. A test that needs a looser one
says why beside it."""


@pytest.fixture(scope="session")
def tolerance() -> Callable[[DTypeLike], dict[str, float]]:
    """`tolerance(dtype)`: keyword arguments for `np.testing.assert_allclose`."""
    return lambda dtype: TOLERANCES[np.dtype(dtype).name].kwargs


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("opt-tokenizer")`: a folder of real models and text, or a skip with its reason.

    The folders are too large for the repository. They lie in `$RLHF_JAX_DATA`, or in
    `../shared/data` beside the checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("RLHF_JAX_DATA", beside))

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"no {name} in {root}: set RLHF_JAX_DATA to the folder that holds it")
        return path

    return find


@pytest.fixture(scope="session", autouse=True)
def _devices() -> None:
    """Fail at once, with one message, where a plugin started the backend before this file ran."""
    found = jax.device_count()
    if found != NUM_DEVICES:
        pytest.exit(f"tests need {NUM_DEVICES} simulated CPU devices, JAX started with {found}")
