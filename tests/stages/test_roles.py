"""The four models of PPO: which buffers they share, and what starts equal."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_jax.models.adapted import without_adapters
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.roles import Roles, load_roles
from tests.stages.test_trainable import MIXED, ONLY, opt, run_in

NONE = LoRAConfig()


def load(directory: Path, **settings: Any) -> Roles:
    """An actor and a reward model from which the critic starts."""
    run = run_in(directory / "run", ppo=PPOConfig(**settings))
    reward = opt("opt_scorer", scalar=True)
    with jax.set_mesh(run.mesh):
        return load_roles(run, opt(), RewardPlan((), reward, False, reward), 10)[0]


def buffers(tree: Any) -> set[int]:
    """Where the parts of arrays lie."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


@pytest.mark.parametrize("lora", [NONE, MIXED, ONLY], ids=["none", "mixed", "only"])
def test_what_an_update_donates_belongs_to_no_other_model(tmp_path, lora):
    """Actor and critic are donated whole: masters and moments too."""
    roles = load(tmp_path, actor_lora=lora, critic_lora=lora)
    donated = buffers((roles.actor, roles.critic))
    leaves = jax.tree.leaves((roles.actor, roles.critic))
    assert len(donated) == sum(len(buffers(leaf)) for leaf in leaves)
    kept = buffers((roles.reference, roles.reward, roles.frozen))
    assert not donated & kept
    frozen = buffers(without_adapters(roles.frozen))
    assert frozen <= buffers((roles.reference, roles.reward))


def test_a_critics_head_may_start_at_zero_and_the_reward_models_stays(tmp_path):
    roles = load(tmp_path, reset_critic_head=True)
    assert roles.reward is not None
    assert not np.asarray(roles.value_model.head_W).any()
    assert np.asarray(roles.reward.head_W).any()
    jax.tree.map(np.testing.assert_array_equal, roles.value_model.body, roles.reward.body)
