"""Step 3 with adapters beside a base in int8: what is shared and what it leaves."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.models.lora import adapters_in
from rlhf_jax.models.quantized import is_quantized, widened
from rlhf_jax.stages import ppo


def settings(unbroken) -> dict[str, object]:
    return {
        "step": (3,),
        "mesh": "4x2",
        "actor_model": str(unbroken.directory / "sft"),
        "reward_model": str(unbroken.directory / "reward"),
        "ppo.actor_lora.dim": 4,
        "ppo.actor_lora.only": True,
        "ppo.actor_lora.load_in_8bit": True,
        "ppo.critic_lora.dim": 4,
        "ppo.critic_lora.load_in_8bit": True,
        "ppo.offload": True,
        "ppo.max_prompt_buckets": 1,
    }


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[ppo.Roles]:
    """The models of the runs that follow, before training."""
    found: list[ppo.Roles] = []
    load = ppo.load_roles

    def remember(*args, **kwargs):
        loaded, cast = load(*args, **kwargs)
        found.append(loaded)
        return loaded, cast

    monkeypatch.setattr(ppo, "load_roles", remember)
    return found


def test_a_base_in_int8_trains_is_the_reference_and_is_exported(
    unbroken, small, run, roles, tmp_path: Path
) -> None:
    """The exported actor is the numbers that int8 stands for plus its adapter, which is exported as
    it is.
    """
    outcome = run(small(tmp_path / "run", settings(unbroken)))
    rows = outcome.metrics()
    assert rows[("ppo", 0)]["eval/objective/kl"] == pytest.approx(0, abs=1e-4)
    assert rows[("ppo", 3)]["policy/grad_norm"] > 0
    (before,) = roles
    bases = dict(adapters_in(before.policy))
    assert len(bases) == 4 * len(before.policy.layers)
    for path, weight in bases.items():
        assert is_quantized(weight.base_FD), path
    for mine, other in zip(before.policy.layers, before.reference.layers, strict=True):
        assert mine.up_FD.base_FD.values_FD is other.up_FD.values_FD  # pyright: ignore
    check_export(outcome.directory, bases["layers.0.down_FD"])


def check_export(directory: Path, weight) -> None:
    """Of the second matrix of the mlp, whose rows are columns in the files."""
    whole = load_file(directory / "actor" / "model.safetensors")
    adapter = load_file(directory / "actor_adapter" / "adapter_model.safetensors")
    name = next(n for n in whole if "layers.0" in n and ("fc2.weight" in n or "down_proj" in n))
    low, high = (
        next(t for n, t in adapter.items() if "layers.0" in n and n.endswith(f"lora_{x}.weight")
             and ("fc2" in n or "down_proj" in n))
        for x in "AB"
    )  # fmt: skip
    assert np.abs(low @ low.T).max() > 0
    assert np.abs(high).max() > 0
    base = np.asarray(jax.jit(widened)(weight.base_FD))[: whole[name].shape[1]].T
    expected = base + weight.scale * (high @ low)
    np.testing.assert_allclose(whole[name], expected, atol=1e-6)
