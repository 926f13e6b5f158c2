"""Step 3 with models and averages in host memory, or on packed rows: the same numbers."""

import jax
import pytest

from rlhf_jax.stages import ppo


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Where each model of the run that follows lies, and in which dtype."""
    found: dict[str, set[str]] = {}
    load = ppo.load_roles

    def remember(*args, **kwargs):
        roles, cast = load(*args, **kwargs)
        for name in ("reference", "reward"):
            leaves = jax.tree.leaves(getattr(roles, name))
            found[name] = {f"{leaf.sharding.memory_kind}/{leaf.dtype}" for leaf in leaves}
        return roles, cast

    monkeypatch.setattr(ppo, "load_roles", remember)
    return found


def test_offloading_frozen_models_changes_no_number(
    unbroken, small, run, same_metrics, placed, tmp_path
) -> None:
    """The step 3 of the run on 4x2 once more, from what its steps 1 and 2 left."""
    changes = {
        "step": (3,),
        "mesh": "4x2",
        "actor_model": str(unbroken.directory / "sft"),
        "reward_model": str(unbroken.directory / "reward"),
        "ppo.offload_reference_model": True,
        "ppo.offload_reward_model": True,
        "ppo.ema.enable": True,
        "ppo.ema.offload": True,
    }
    outcome = run(small(tmp_path / "run", changes))
    assert placed == {"reference": {"pinned_host/float32"}, "reward": {"pinned_host/float32"}}
    rows = {key: row for key, row in unbroken.metrics().items() if key[0] == "ppo"}
    same_metrics(rows, outcome.metrics(), rtol=1e-6)
    assert outcome.answers() == unbroken.answers()
    assert (outcome.directory / "actor_ema" / "model.safetensors").is_file()


def test_frozen_models_in_another_dtype(unbroken, small, run, placed, tmp_path) -> None:
    """bfloat16 beside a float32 actor: the KL of the first policy to itself is its rounding."""
    changes = {
        "step": (3,),
        "mesh": "4x2",
        "actor_model": str(unbroken.directory / "sft"),
        "reward_model": str(unbroken.directory / "reward"),
        "ppo.frozen_dtype": "bfloat16",
        "ppo.max_steps": 1,
    }
    outcome = run(small(tmp_path / "run", changes))
    assert placed == {"reference": {"device/bfloat16"}, "reward": {"device/bfloat16"}}
    kl = outcome.metrics()[("ppo", 0)]["eval/objective/kl"]
    assert 0 < abs(kl) < 0.05
    assert unbroken.metrics()[("ppo", 0)]["eval/objective/kl"] == pytest.approx(0, abs=1e-4)


def test_optimizers_in_host_memory_change_no_number(
    unbroken, small, run, same_metrics, tmp_path
) -> None:
    """Steps 1 and 3 once more, with actor and critic updated layer by layer from the host."""
    changes = {
        "step": (1, 3),
        "mesh": "4x2",
        "reward_model": str(unbroken.directory / "reward"),
        "sft.offload": True,
        "ppo.offload": True,
        "ppo.ema.enable": True,
    }
    outcome = run(small(tmp_path / "run", changes))
    rows = {key: row for key, row in unbroken.metrics().items() if key[0] in ("sft", "ppo")}
    same_metrics(rows, outcome.metrics(), rtol=1e-4)
    assert outcome.answers() == unbroken.answers()
    assert (outcome.directory / "actor_ema" / "model.safetensors").is_file()


def test_packing_changes_no_number(unbroken, small, run, same_metrics, tmp_path) -> None:
    """Step 3 with longer answers, as rows and on sequences of rows dealt out to two devices."""
    changes = {
        "step": (3,),
        "mesh": "2x1",
        "actor_model": str(unbroken.directory / "sft"),
        "reward_model": str(unbroken.directory / "reward"),
        "ppo.max_answer_seq_len": 24,
        "ppo.max_steps": 2,
    }
    plain = run(small(tmp_path / "plain", changes))
    packed = run(small(tmp_path / "packed", changes | {"ppo.packing": True}))
    rows = packed.metrics()
    for step in (1, 2):
        for program in ("score", "update"):
            assert rows["ppo", step][f"perf/{program}_tokens_saved"] > 0.2
    same_metrics(plain.metrics(), rows, rtol=1e-4)
    assert packed.answers() == plain.answers()
