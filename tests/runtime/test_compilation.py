"""Asking XLA for operations that repeat to the bit: in time, or an error."""

import subprocess
import sys

import pytest

from rlhf_jax.runtime.compilation import DETERMINISTIC, exclude_nondeterministic_operations

ASK = """
import os
os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
import jax
jax.config.update("jax_platforms", "cpu")
from rlhf_jax.runtime.compilation import exclude_nondeterministic_operations as ask
ask()
ask()
print(os.environ["XLA_FLAGS"], jax.device_count())
"""


def test_xla_takes_the_flag_beside_others() -> None:
    """An unknown flag would stop the process when its devices start."""
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["--xla_cpu_enable_fast_math=false", *DETERMINISTIC.split(), "1"]


def test_too_late_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=f"start Python with XLA_FLAGS='{DETERMINISTIC}'"):
        exclude_nondeterministic_operations()
