"""The four models of PPO: actor, reference, critic and reward, loaded onto one mesh."""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.engine.offloaded import create_offloaded
from rlhf_jax.engine.optimizer import Rates
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.engine.state import AnyOptimizer, TrainState, create_state
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.lora import combine
from rlhf_jax.models.params import (
    Params,
    ScalarModel,
    compute_layout,
    store_layout,
)
from rlhf_jax.stages.frozen import frozen_dtype, frozen_layout
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.trainable import Trainable, load_frozen, load_trainable


@flax.struct.dataclass
class Roles:
    """Parameters by role, all in STORE. Actor and critic train; the others are frozen.

    With LoRA most of actor and critic does not train: `frozen` has that of each, and `policy` and
    `value_model` are whole models. `dropout_key` is there where adapters drop out. The reward
    model is `reward` where it reads the actor's ids, `text_reward` where it reads text; neither is
    there where functions score alone.
    """

    actor: TrainState
    critic: TrainState
    reference: Params[jax.Array]
    reward: ScalarModel[jax.Array] | None
    text_reward: ScalarModel[jax.Array] | None = None
    frozen: tuple[Any, Any] = (None, None)
    dropout_key: jax.Array | None = None

    @property
    def policy(self) -> Params[jax.Array]:
        """The whole actor."""
        return self.whole_actor(self.actor.params)

    @property
    def value_model(self) -> ScalarModel[jax.Array]:
        """The whole critic."""
        return combine(self.critic.params, self.frozen[1])

    def whole_actor(self, trained: Any) -> Params[jax.Array]:
        """The actor with other values of what trains, such as their average."""
        return combine(trained, self.frozen[0])


@dataclass(frozen=True)
class Cast:
    """What is static about the roles: where each model computes, and how it is optimised."""

    actor: ModelOnMesh
    critic: ModelOnMesh
    reward: ModelOnMesh | None
    optimizers: tuple[AnyOptimizer, AnyOptimizer]
    rates: tuple[Rates, Rates]
    fresh: tuple[bool, bool] = (True, True)
    """Whether the adapters of actor and critic are new, not an earlier run's."""

    @property
    def places(self) -> dict[str, ModelOnMesh | None]:
        """Where the models that score a rollout compute, by role."""
        return {"actor": self.actor, "critic": self.critic, "reward": self.reward}


def load_roles(
    run: Run, actor: Pretrained, plan: RewardPlan, num_updates: int
) -> tuple[Roles, Cast]:
    """Reads the models; actor and reference start equal. What trains has buffers of its own."""
    cfg = run.cfg.ppo
    actor_store, critic_store = (
        store_layout(actor.cfg, run.mesh),
        store_layout(plan.critic.cfg, run.mesh),
    )
    key = run.key(0, "init")
    policy = load_trainable(actor, cfg.actor_lora, actor_store, run.dtype, key=key)
    critic = load_trainable(
        plan.critic, cfg.critic_lora, critic_store, run.dtype, scalar=True, key=key
    )
    reference = load_frozen(
        run, actor, policy, offload=cfg.offload_reference_model, dtype=cfg.frozen_dtype, key=key
    )
    scorer = load_scorer(run, plan, critic, key=key)
    if cfg.reset_critic_head:
        head = jnp.zeros_like(critic.params.head_W)
        critic = replace(critic, params=replace(critic.params, head_W=head))
    optimizers = (
        policy.optimizer(cfg.optimizer("actor"), num_updates),
        critic.optimizer(cfg.optimizer("critic"), num_updates),
    )
    drops = any(model.drops for model in (policy, critic))
    create = create_offloaded if cfg.offload else create_state
    roles = Roles(
        actor=create(policy.trained, optimizers[0]),
        critic=create(critic.trained, optimizers[1]),
        reference=reference,
        reward=None if plan.by_text else scorer,
        text_reward=scorer if plan.by_text else None,
        frozen=(policy.frozen, critic.frozen),
        dropout_key=run.key(0, "dropout/ppo") if drops else None,
    )
    cast = Cast(
        actor=ModelOnMesh(actor.cfg, compute_layout(actor.cfg, run.mesh)),
        critic=ModelOnMesh(plan.critic.cfg, compute_layout(plan.critic.cfg, run.mesh)),
        reward=place_of(plan.reward, run),
        optimizers=optimizers,
        rates=(
            policy.rates(cfg.optimizer("actor"), num_updates),
            critic.rates(cfg.optimizer("critic"), num_updates),
        ),
        fresh=(policy.fresh, critic.fresh),
    )
    return roles, cast


def place_of(model: Pretrained | None, run: Run) -> ModelOnMesh | None:
    """Where a model computes."""
    return model and ModelOnMesh(model.cfg, compute_layout(model.cfg, run.mesh))


def load_scorer(
    run: Run, plan: RewardPlan, critic: Trainable, *, key: jax.Array
) -> ScalarModel[jax.Array] | None:
    """The reward model: what the critic starts from, or a model of its own."""
    cfg, reward = run.cfg.ppo, plan.reward
    if reward is None:
        return None
    if plan.critic is reward:
        return load_frozen(
            run, reward, critic,
            offload=cfg.offload_reward_model, dtype=cfg.frozen_dtype, scalar=True, key=key,
        )  # fmt: skip
    layout = frozen_layout(store_layout(reward.cfg, run.mesh), cfg.offload_reward_model)
    return reward.scalar_model(layout, frozen_dtype(run, cfg.frozen_dtype), key=key)
