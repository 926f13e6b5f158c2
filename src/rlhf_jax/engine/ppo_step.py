"""PPO's two programs: scoring a rollout, and one update of actor and critic together."""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from meshes.layout import Layout
from rlhf_jax.data.batches import TextBatch
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.row_passes import (
    ModelOnMesh,
    answer_logprobs,
    answer_values,
    join_rows,
    row_scores,
)
from rlhf_jax.engine.state import AnyOptimizer, TrainState, apply_gradients
from rlhf_jax.engine.step import Metrics, all_finite, fold_step, gradients
from rlhf_jax.models.decoder import Remat, forward
from rlhf_jax.models.packed_rows import Places
from rlhf_jax.models.params import Params, ScalarModel
from rlhf_jax.models.scoring import score_tokens, take_window
from rlhf_jax.objectives.adaptive import AdaptiveKL, Control, adapt_kl_coef, scale_scores
from rlhf_jax.objectives.experience import Experience, RewardSettings, build_experience
from rlhf_jax.objectives.losses import (
    of_whole_batch,
    policy_loss,
    prediction_mask,
    sft_loss,
    value_loss,
)
from rlhf_jax.objectives.masked import length_mask, masked_mean, masked_var
from rlhf_jax.objectives.rewards import add_scores, standardize_scores
from rlhf_jax.objectives.rollout_correction import compare_with_rollout


@dataclass(frozen=True)
class UpdateSettings:
    """What one PPO update minimises; static under jit."""

    temperature: float
    clip_range: float
    value_clip_range: float
    value_coef: float
    entropy_coef: float
    target_kl: float | None
    num_parts: int
    remat: Remat
    ptx_coef: float = 0.0


@flax.struct.dataclass
class Scorers:
    """The models that score a rollout. The actor serves only to recompute log-probabilities;
    without a reward model the score is what comes from outside.
    """

    actor: Params[jax.Array]
    reference: Params[jax.Array]
    critic: ScalarModel[jax.Array]
    reward: ScalarModel[jax.Array] | None


@dataclass(frozen=True)
class ScoringSettings:
    """How a rollout becomes experience; static under jit.

    The reward model's scores are standardised with `score_mean` and `score_std` and multiplied by
    `reward_model_weight`. `adaptive_kl` serves where the `Control` has a KL coefficient,
    `center_scores` where it has moments, `rollout_is_threshold` with `recompute_logprobs`.
    """

    reward: RewardSettings
    temperature: float
    score_mean: float
    score_std: float
    recompute_logprobs: bool
    reward_model_weight: float = 1.0
    adaptive_kl: AdaptiveKL | None = None
    center_scores: bool = False
    rollout_is_threshold: float | None = None

    def __post_init__(self) -> None:
        assert self.recompute_logprobs or self.rollout_is_threshold is None


def score_rollout(
    models: Scorers,
    prompts: Any,
    rollout: Rollout,
    extra_scores_B: jax.Array | None,
    control: Control,
    places: Places | None = None,
    *,
    actor: ModelOnMesh,
    critic: ModelOnMesh,
    reward: ModelOnMesh | None = None,
    settings: ScoringSettings,
) -> tuple[Experience, Control, Metrics]:
    """Reference log-probabilities, values and rewards of a rollout: its experience and metrics.

    `extra_scores_B` are added to the reward model's scores, and `control` is what this batch used
    on the way in, and what the next one uses on the way out. Where rows have `places`, they go
    through the models in sequences. `reward` is None where the reward model has the critic's sizes.
    """
    layout = actor.layout
    rollout = jax.tree.map(
        lambda x: jax.sharding.reshard(x, layout.sharding("batch", *(None,) * (x.ndim - 1))),
        rollout,
    )
    starts, num_answer = prompts.lengths_B, rollout.tokens_BR.shape[1]
    tokens = join_rows(prompts.tokens_BP, starts, rollout.tokens_BR, layout)
    args = (tokens, starts, num_answer, actor, settings.temperature, "none", places)
    ref_logprobs, _ = answer_logprobs(models.reference, *args)
    logprobs, entropies, weights, shift = rollout.logprobs_BR, None, None, {}
    if settings.recompute_logprobs:
        logprobs, entropies = answer_logprobs(models.actor, *args)
        mask = length_mask(rollout.lengths_B, num_answer) & (prompts.valid_B > 0)[:, None]
        weights, shift = compare_with_rollout(
            logprobs, rollout.logprobs_BR, mask, threshold=settings.rollout_is_threshold
        )
    values = answer_values(models.critic, tokens, starts, num_answer, critic, places=places)
    scores = add_scores(
        answer_scores(models.reward, tokens, starts, rollout, reward or critic, settings, places),
        extra_scores_B,
    )
    scaled, rewarded = scale_scores(control, scores, prompts.valid_B, center=settings.center_scores)
    experience, metrics = build_experience(
        settings.reward,
        tokens_BT=tokens,
        prompt_lengths_B=starts,
        response_lengths_B=rollout.lengths_B,
        ended_B=rollout.ended_B,
        valid_B=prompts.valid_B,
        logprobs_BR=logprobs,
        ref_logprobs_BR=ref_logprobs,
        values_BR=values,
        scores_B=scores,
        rewarded_scores_B=rewarded,
        kl_coef=control.kl_coef,
        entropies_BR=entropies,
        weights_BR=weights,
    )
    control, adapted = steer(scaled, metrics["objective/kl"], prompts.valid_B, settings)
    return experience, control, metrics | shift | adapted


def answer_scores(
    reward: ScalarModel[jax.Array] | None,
    tokens_BT: jax.Array,
    prompt_lengths_B: jax.Array,
    rollout: Rollout,
    place: ModelOnMesh,
    settings: ScoringSettings,
    places: Places | None = None,
) -> jax.Array | None:
    """The reward model's score of each answer, standardised and weighted.

    It is read at the answer's last token, or, where the stop token is not trained
    (DeepSpeed-Chat), at the last one before it.
    """
    if reward is None:
        return None
    last = prompt_lengths_B + rollout.lengths_B - 1
    if not settings.reward.train_eos:
        last = last - rollout.ended_B
    read = row_scores(reward, tokens_BT, place, places=places)
    raw_B1 = take_window(read, jnp.maximum(last, 0), 1, place.layout, places)
    scores = standardize_scores(raw_B1[:, 0], mean=settings.score_mean, std=settings.score_std)
    return settings.reward_model_weight * scores


def steer(
    control: Control, kl: jax.Array, valid_B: jax.Array, settings: ScoringSettings
) -> tuple[Control, Metrics]:
    """What the next batch uses, and metrics of what this one used."""
    metrics: Metrics = {}
    if control.moments is not None:
        metrics["objective/running_score_mean"] = control.moments.mean
        metrics["objective/running_score_std"] = control.moments.std
    if control.kl_coef is not None:
        assert settings.adaptive_kl is not None, "a coefficient in the control adapts"
        metrics["objective/kl_coef"] = control.kl_coef
        num_answers = valid_B.astype(jnp.float32).sum()
        coef = adapt_kl_coef(control.kl_coef, kl, num_answers, settings.adaptive_kl)
        control = replace(control, kl_coef=coef)
    return control, metrics


def take_rows(experience: Experience, rows: jax.Array, layout: Layout) -> Experience:
    """The rows of one minibatch."""
    return jax.tree.map(
        lambda x: x.at[rows].get(out_sharding=layout.spec("batch", *(None,) * (x.ndim - 1))),
        experience,
    )


def num_actions(batch: Experience) -> jax.Array:
    """How many actions are trained."""
    return batch.mask_BR.sum().astype(jnp.float32)


def actor_loss(
    params: Params[jax.Array],
    batch: Experience,
    model: ModelOnMesh,
    settings: UpdateSettings,
    places: Places | None = None,
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate, less the entropy bonus."""
    logprobs, entropies = answer_logprobs(
        params, batch.tokens_BT, batch.prompt_lengths_B, batch.mask_BR.shape[1],
        model, settings.temperature, settings.remat, places,
    )  # fmt: skip
    loss, metrics = policy_loss(
        logprobs, batch.logprobs_BR, batch.advantages_BR, batch.mask_BR, batch.weights_BR,
        clip=settings.clip_range,
    )  # fmt: skip
    entropy = masked_mean(entropies, batch.mask_BR)
    shift = jnp.where(batch.mask_BR, jnp.abs(logprobs - batch.logprobs_BR), 0.0)
    metrics |= {
        "policy/entropy_avg": entropy,
        "policy/abs_log_ratio": masked_mean(shift, batch.mask_BR),
    }
    return loss - settings.entropy_coef * entropy, metrics


def ptx_loss(
    params: Params[jax.Array], batch: Any, model: ModelOnMesh, settings: UpdateSettings
) -> tuple[jax.Array, Metrics]:
    """`ptx_coef` times the cross-entropy a token of pretraining text (InstructGPT, equation 2)."""
    hidden = forward(params, batch.tokens_BT, model.cfg, model.layout, remat=settings.remat)
    logprobs, _ = score_tokens(
        params, hidden[:, :-1], batch.tokens_BT[:, 1:], model.cfg, model.layout,
        remat=settings.remat,
    )  # fmt: skip
    loss = sft_loss(logprobs, text_mask(batch))
    return settings.ptx_coef * loss, {"loss/ptx_avg": loss}


def text_mask(batch: Any) -> jax.Array:
    """All predictions of real rows, `[B, T-1]`."""
    lengths, prompts, valid, width = (
        batch.lengths_B, batch.prompt_lengths_B, batch.valid_B, batch.tokens_BT.shape[1] - 1,
    )  # fmt: skip
    return prediction_mask(lengths, prompts, valid, width=width, train_on="all")


def num_text_predictions(batch: Any) -> jax.Array:
    """How many predictions of pretraining text carry loss."""
    return text_mask(batch).sum().astype(jnp.float32)


def critic_loss(
    model: ScalarModel[jax.Array],
    batch: Experience,
    place: ModelOnMesh,
    settings: UpdateSettings,
    places: Places | None = None,
    center: jax.Array | float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """The clipped value loss; for `center` see `value_loss`."""
    values = answer_values(
        model, batch.tokens_BT, batch.prompt_lengths_B, batch.mask_BR.shape[1],
        place, settings.remat, places,
    )  # fmt: skip
    loss, metrics = value_loss(
        values, batch.values_BR, batch.returns_BR, batch.mask_BR, center,
        clip=settings.value_clip_range,
    )  # fmt: skip
    return settings.value_coef * loss, metrics


@flax.struct.dataclass
class BothGradients:
    """Float32 gradients of actor and critic, their norms, and whether steps are taken on them: they
    are where all is `finite` and the update phase has not `stopped`.
    """

    actor: Any
    critic: Any
    norms: tuple[jax.Array, jax.Array]
    finite: jax.Array
    stopped: jax.Array
    metrics: Metrics


def ppo_update(
    actor: TrainState,
    critic: TrainState,
    *args: Any,
    optimizers: tuple[AnyOptimizer, AnyOptimizer],
    **kwargs: Any,
) -> tuple[TrainState, TrainState, jax.Array, Metrics]:
    """One optimizer step of both models on `ppo_gradients`, as one program.

    Both are skipped where either has a gradient that is not finite (counted), and where the policy
    has moved further from its rollout than `target_kl` (for the rest of the update phase).
    """
    found = ppo_gradients(actor, critic, *args, **kwargs)
    allowed = ~found.stopped
    actor = apply_gradients(actor, found.actor, optimizers[0], found.finite, allowed=allowed)
    critic = apply_gradients(critic, found.critic, optimizers[1], found.finite, allowed=allowed)
    return actor, critic, found.stopped, found.metrics


def ppo_gradients(
    actor: TrainState,
    critic: TrainState,
    experience: Experience,
    rows: jax.Array,
    stopped: jax.Array,
    ptx: TextBatch | None = None,
    *,
    frozen: tuple[Any, Any] = (None, None),
    key: jax.Array | None = None,
    places: Places | None = None,
    actor_place: ModelOnMesh,
    critic_place: ModelOnMesh,
    settings: UpdateSettings,
) -> BothGradients:
    """The gradients of both models on some rows of an experience.

    `frozen` holds what of actor and critic does not train; with a `key` their adapters drop out.
    Where there is pretraining text (`ptx`), the gradient of its loss is added to the actor's.
    `places` are those of `rows`, in their order and with sequences of each part's own.
    """
    batch = take_rows(experience, rows, actor_place.layout), places
    parts = settings.num_parts
    keys = (None,) * 3 if key is None else jax.random.split(fold_step(key, actor), 3)
    actor_grads, actor_value, metrics = gradients(
        lambda p, b: actor_loss(p, b[0], actor_place, settings, b[1]),
        actor.params, batch, lambda b: num_actions(b[0]), parts,
        frozen=frozen[0], key=keys[0],
    )  # fmt: skip
    if ptx is not None:
        text_grads, text_value, text_metrics = gradients(
            lambda p, b: ptx_loss(p, b, actor_place, settings),
            actor.params, ptx, num_text_predictions, parts,
            frozen=frozen[0], key=keys[1],
        )  # fmt: skip
        actor_grads = jax.tree.map(jnp.add, actor_grads, text_grads)
        actor_value, metrics = actor_value + text_value, metrics | text_metrics
    # Nothing else orders the two: interleaved, what both forward passes keep is alive at once.
    batch, actor_grads = jax.lax.optimization_barrier((batch, actor_grads))
    taken, mask = batch[0], batch[0].mask_BR
    center = masked_mean(taken.values_BR - taken.returns_BR, mask)
    critic_grads, critic_value, critic_metrics = gradients(
        lambda p, b: critic_loss(p, b[0], critic_place, settings, b[1], center),
        critic.params, batch, lambda b: num_actions(b[0]), parts,
        frozen=frozen[1], key=keys[2],
    )  # fmt: skip
    norms = optax.tree.norm(actor_grads), optax.tree.norm(critic_grads)
    finite = all_finite(*norms, actor_value, critic_value)
    if settings.target_kl is not None:
        stopped = stopped | (metrics["policy/approxkl_avg"] > settings.target_kl)
    metrics = of_whole_batch(metrics | critic_metrics, masked_var(taken.returns_BR, mask))
    metrics |= {
        "policy/grad_norm": norms[0],
        "critic/grad_norm": norms[1],
        "val/skipped": 1.0 - finite,
        "val/stopped": stopped.astype(jnp.float32),
    }
    return BothGradients(actor_grads, critic_grads, norms, finite, stopped, metrics)
