"""`import rlhf_jax` costs nothing that a person would notice."""

import subprocess
import sys

import pytest

import rlhf_jax

PROGRAM = """
import sys, time
import jax

began = time.perf_counter()
import rlhf_jax
seconds = time.perf_counter() - began

assert {"load", "Model", "Generation"} <= set(dir(rlhf_jax))
assert "transformers" not in sys.modules
rlhf_jax.load
assert "rlhf_jax.stages.run" not in sys.modules  # generating needs nothing that trains
jax.config.update("jax_num_cpu_devices", 3)  # an error once a device was touched
assert jax.device_count() == 3
print(seconds)
"""


def test_importing_is_fast_and_touches_no_device() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rlhf_jax' has no attribute 'no_such_name'"):
        rlhf_jax.no_such_name  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
