"""The engine's own rules: what it refuses, and who owns a pinned copy."""

import jax
import numpy as np
import pytest

from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.params import param_specs, shardings
from tests.engine.drive import Driver, prompts, to_numpy
from tests.models.cases import OPT

KEY = jax.random.key(5)
SAMPLING = SamplingConfig(max_new_tokens=4)


def test_prompts_and_answers_beyond_the_position_table_are_refused():
    engine = Driver(OPT).engine
    engine.check_batch((8, 6), SamplingConfig(max_new_tokens=26))
    with pytest.raises(ValueError, match=r"6 \+ 27 = 33 tokens, the model has 32 positions"):
        engine.generate(Driver(OPT).actor(), prompts(), SamplingConfig(max_new_tokens=27), key=KEY)


def test_a_batch_that_does_not_divide_is_refused():
    engine = Driver(OPT, "8x1", 2).engine
    engine.check_batch((12, 6), SAMPLING)
    with pytest.raises(
        ValueError, match="6 prompts does not divide over 4 devices: .* multiple of 4"
    ):
        engine.check_batch((6, 6), SAMPLING)


@pytest.mark.parametrize(("mesh", "inference_tp"), [("8x1", 1), ("8x1", 8)])
def test_a_pinned_copy_owns_its_buffers(mesh, inference_tp):
    """Also where STORE and GENERATE are equal: an update may donate the originals."""
    driver = Driver(OPT, mesh, inference_tp)
    params = driver.actor()
    expected = to_numpy(params)
    pinned = driver.engine.pin(params)
    assert jax.tree.map(lambda x: x.sharding, pinned) == shardings(
        param_specs(OPT), driver.engine.rollout
    )
    jax.tree.map(lambda leaf: leaf.delete(), params)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(pinned), expected)


def test_a_pinned_copy_gives_the_same_answers():
    driver = Driver(OPT, "4x2", 4)
    params = driver.actor()
    stored, pinned = (
        driver.engine.generate(p, prompts(), SAMPLING, key=KEY)
        for p in (params, driver.engine.pin(params))
    )
    jax.tree.map(np.testing.assert_array_equal, to_numpy(pinned), to_numpy(stored))


def test_generation_leaves_the_parameters_alone():
    """What it reads are the update's own buffers: they are neither donated nor changed."""
    driver = Driver(OPT, "4x2", 4)
    params = driver.actor()
    before = to_numpy(params)
    driver.engine.generate(params, prompts(), SAMPLING, key=KEY)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(params), before)
