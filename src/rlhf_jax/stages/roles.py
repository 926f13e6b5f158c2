"""The four models of PPO: actor, reference, critic and reward, loaded onto one mesh."""

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rlhf_jax.engine.optimizer import make_optimizer
from rlhf_jax.engine.ppo_step import ModelOnMesh
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.params import (
    Params,
    ScalarModel,
    compute_layout,
    param_specs,
    scalar_specs,
    store_layout,
)
from rlhf_jax.stages.run import Run


@flax.struct.dataclass
class Roles:
    """Parameters by role, all in STORE. Actor and critic train; the others are frozen."""

    actor: TrainState
    critic: TrainState
    reference: Params[jax.Array]
    reward: ScalarModel[jax.Array]


@dataclass(frozen=True)
class Cast:
    """What is static about the roles: where each model computes, and how it is optimised."""

    actor: ModelOnMesh
    critic: ModelOnMesh
    optimizers: tuple[optax.GradientTransformation, optax.GradientTransformation]


def load_roles(
    run: Run, actor: Pretrained, reward: Pretrained, num_updates: int
) -> tuple[Roles, Cast]:
    """Reads each model into its own buffers; actor and reference start equal."""
    check_same_tokens(actor, reward)
    cfg = run.cfg.ppo
    actor_store, reward_store = (
        store_layout(actor.cfg, run.mesh),
        store_layout(reward.cfg, run.mesh),
    )
    optimizers = (
        make_optimizer(cfg.optimizer("actor"), param_specs(actor.cfg), num_updates),
        make_optimizer(cfg.optimizer("critic"), scalar_specs(reward.cfg), num_updates),
    )
    key = run.key(0, "init")

    def policy() -> Params[jax.Array]:
        return actor.params(actor_store, run.dtype, key=key)

    def scorer() -> ScalarModel[jax.Array]:
        return reward.scalar_model(reward_store, run.dtype, key=key)

    critic = scorer()
    if cfg.reset_critic_head:
        critic = replace(critic, head_W=jnp.zeros_like(critic.head_W))
    roles = Roles(
        actor=create_state(policy(), optimizers[0]),
        critic=create_state(critic, optimizers[1]),
        reference=policy(),
        reward=scorer(),
    )
    cast = Cast(
        actor=ModelOnMesh(actor.cfg, compute_layout(actor.cfg, run.mesh)),
        critic=ModelOnMesh(reward.cfg, compute_layout(reward.cfg, run.mesh)),
        optimizers=optimizers,
    )
    return roles, cast


def check_same_tokens(actor: Pretrained, reward: Pretrained) -> None:
    """ValueError unless the reward model reads the actor's token ids.

    What either one pads with is left out: it is never read, and exports choose it themselves.
    """
    if reward.cfg.vocab_size < actor.cfg.vocab_size:
        raise ValueError(
            f"the actor ({actor.name}) can answer with any of {actor.cfg.vocab_size} tokens, the "
            f"reward model ({reward.name}) knows {reward.cfg.vocab_size}: use models of one family"
        )
    pads = {str(model.tokenizer.pad_token) for model in (actor, reward)}
    ours, theirs = vocabulary(actor, without=pads), vocabulary(reward, without=pads)
    if ours == theirs:
        return
    differing = sorted(set(ours.items()) ^ set(theirs.items()))[:3]
    raise ValueError(
        f"the actor ({actor.name}) and the reward model ({reward.name}) have different tokenizers "
        f"({len(ours)} and {len(theirs)} tokens; differing for example in {differing}): "
        "use models of one family"
    )


def vocabulary(model: Pretrained, *, without: set[str]) -> dict[str, int]:
    """Token to id."""
    vocab = model.tokenizer.get_vocab()
    return {token: index for token, index in vocab.items() if token not in without}
