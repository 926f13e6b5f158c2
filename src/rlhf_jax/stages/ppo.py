"""Step 3: PPO against the reward model. One iteration = generate, score, update."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import Layout
from meshes.offload import to_device
from meshes.reshard import put_batch, put_rows
from rlhf_jax.engine.ema import EMA, average_params, ema_program, start_ema
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.offloaded_steps import offloaded_ppo_update
from rlhf_jax.engine.optimizer import rate_metrics
from rlhf_jax.engine.ppo_step import (
    Scorers,
    ScoringSettings,
    UpdateSettings,
    ppo_update,
    score_rollout,
)
from rlhf_jax.engine.state import TrainState, schedule_step
from rlhf_jax.engine.step import Metrics
from rlhf_jax.hf.export import save_hf, save_reward_hf
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.objectives.adaptive import Control, Moments
from rlhf_jax.runtime.log import progress, say
from rlhf_jax.stages.evaluate import Evaluator
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ppo_rows import RowPacking, Scored, count_updates, minibatches
from rlhf_jax.stages.prompts import PromptData, ppo_data
from rlhf_jax.stages.reward_plan import RewardPlan, plan_rewards, score_statistics
from rlhf_jax.stages.roles import Cast, Roles, load_roles
from rlhf_jax.stages.rows import check_same_rows
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.scores import HostScorer, host_scorer
from rlhf_jax.stages.throughput import throughput
from rlhf_jax.stages.trainable import export_adapter

SHOWN = {
    "scores": "objective/scores",
    "kl": "objective/kl",
    "length": "response_length/mean",
    "clipfrac": "policy/clipfrac_avg",
}
"""What progress calls the metrics that it shows."""


def run_ppo(run: Run, actor: Pretrained, reward: Pretrained | None) -> None:
    """Trains the actor and leaves it in `actor/` (its average in `actor_ema/`), the critic in
    `critic/`. `reward` is None where functions score alone.
    """
    cfg = run.cfg.ppo
    plan = plan_rewards(cfg, actor, reward)
    say(f"ppo: {plan}")
    if cfg.sampling.off_policy:
        say(
            f"ppo: answers are drawn with {', '.join(cfg.sampling.off_policy)}, their "
            "log-probabilities are the policy's without: PPO does not correct for the difference"
        )
    if (correction := describe_correction(cfg)) is not None:
        say(f"ppo: {correction}")
    data = ppo_data(run, actor)
    num_batches = cfg.num_train_epochs * data.train.num_batches
    num_steps = cfg.max_steps or -(-num_batches // cfg.generation_batches)
    sizes = map(data.train.size, range(num_steps * cfg.generation_batches))
    with jax.set_mesh(run.mesh):
        roles, cast = load_roles(run, actor, plan, count_updates(cfg, sizes))
        engine = HybridEngine(
            actor.cfg, run.mesh, actor.cfg.stop_ids,
            merge_adapters=cfg.merge_lora, slots=cfg.rollout_slots,
            weights=cfg.rollout_weights, kv_cache=cfg.rollout_kv_cache,
        )  # fmt: skip
        programs = Programs.create(cfg, cast, plan)
        host = host_scorer(cfg, plan, cast.reward, actor.tokenizer, run.cfg.data.chat_format)
        evaluator = Evaluator(run, engine, programs.score_evaluation, host, data, actor)
        roles, ema = train(run, roles, engine, programs, host, data, evaluator, num_steps)
        policies = {"actor": roles.policy}
        if ema is not None:
            policies["actor_ema"] = roles.whole_actor(to_device(ema.weights))
        for name, policy in policies.items():
            save_hf(
                run.export_dir(name), policy, actor.cfg, run.cfg.dtype,
                actor.tokenizer, actor.source_config,
            )  # fmt: skip
        save_reward_hf(
            run.export_dir("critic"), roles.value_model, plan.critic.cfg, run.cfg.dtype,
            plan.critic.tokenizer, plan.critic.source_config,
        )  # fmt: skip
        export_adapters(run, actor, plan.critic, roles, cast)
    results = evaluator.comparison()
    run.finish_stage("ppo", results | {"steps": num_steps, "skipped": int(roles.actor.skipped)})


def describe_correction(cfg: PPOConfig) -> str | None:
    """What rollouts round, and how the policy loss takes it into account; None for neither."""
    if not cfg.narrow_rollouts and cfg.is_threshold is None:
        return None
    rollouts = f"rollouts with {cfg.narrow_rollouts}" if cfg.narrow_rollouts else "rollouts as is"
    if cfg.is_threshold is None:
        return f"{rollouts}, without importance weights (--ppo.rollout-is-threshold=0)"
    return (
        f"{rollouts}: old log-probabilities are the training graph's, each token's policy loss is "
        f"weighted by their ratio to the rollout's, at most {cfg.is_threshold:g}"
    )


def export_adapters(
    run: Run, actor: Pretrained, critic: Pretrained, roles: Roles, cast: Cast
) -> None:
    """`actor_adapter/` and `critic_adapter/`, where they have adapters."""
    cfg = run.cfg.ppo
    export_adapter(run, "actor", actor, cfg.actor_lora, roles.actor.params, fresh=cast.fresh[0])
    export_adapter(
        run, "critic", critic, cfg.critic_lora, roles.critic.params,
        fresh=cast.fresh[1], scalar=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Programs:
    """The compiled programs of an iteration, beside the engine's generate."""

    score: Any
    score_evaluation: Any
    update: Any
    average: Any

    @classmethod
    def create(cls, cfg: PPOConfig, cast: Cast, plan: RewardPlan) -> "Programs":
        """Jitted: they compile at first use, once per prompt bucket."""
        mean, std = score_statistics(cfg, plan.reward)
        scoring = ScoringSettings(
            reward=cfg.reward_settings,
            temperature=cfg.sampling.score_temperature,
            score_mean=mean,
            score_std=std,
            recompute_logprobs=cfg.recomputes_logprobs,
            rollout_is_threshold=cfg.is_threshold,
            reward_model_weight=cfg.reward_model_weight,
            adaptive_kl=cfg.adaptive_kl,
            center_scores=cfg.score_scaling == "running_mean_std",
        )
        # Evaluation samples at temperature 1 and greedily, whatever training does.
        plain = replace(
            scoring, temperature=1.0, recompute_logprobs=False, rollout_is_threshold=None
        )
        score, score_evaluation = (
            jax.jit(partial(score_rollout, **cast.places, settings=each))
            for each in (scoring, plain)
        )
        static: dict[str, Any] = {
            "actor_place": cast.actor,
            "critic_place": cast.critic,
            "optimizers": cast.optimizers,
            "settings": update_settings(cfg),
        }
        evaluation = score if plain == scoring else score_evaluation
        if cfg.offload:
            update = with_rates(offloaded_ppo_update(**static), cast)
        else:
            step = with_rates(partial(ppo_update, **static), cast)
            update = jax.jit(step, donate_argnums=(0, 1))
        return cls(score, evaluation, update, ema_program(cfg.ema))


def update_settings(cfg: PPOConfig) -> UpdateSettings:
    """What an update minimises."""
    return UpdateSettings(
        temperature=cfg.sampling.score_temperature,
        clip_range=cfg.clip_range,
        value_clip_range=cfg.value_clip_range,
        value_coef=cfg.value_coef,
        entropy_coef=cfg.entropy_coef,
        target_kl=cfg.target_kl,
        num_parts=cfg.gradient_accumulation_steps,
        remat=cfg.remat,
        ptx_coef=cfg.ptx_coef,
    )


def with_rates(step: Any, cast: Cast) -> Any:
    """`ppo_update` with the learning rates of both models among its metrics."""

    def update(actor: TrainState, critic: TrainState, *args: Any, **kwargs: Any) -> Any:
        *after, metrics = step(actor, critic, *args, **kwargs)
        metrics |= rate_metrics(cast.rates[0], schedule_step(actor), "policy/")
        metrics |= rate_metrics(cast.rates[1], schedule_step(critic), "critic/")
        return *after, metrics

    return update


@flax.struct.dataclass
class Companions:
    """What training keeps beside its models: part of a checkpoint, None where it is off."""

    control: Control
    ema: EMA | None

    @classmethod
    def create(cls, cfg: PPOConfig, roles: Roles, layout: Layout) -> "Companions":
        """As they are before the first iteration."""

        def scalar(value: float) -> jax.Array:
            return put_rows(np.asarray(value, np.float32), layout, None)

        moments = Moments(scalar(0), scalar(0), scalar(0))
        control = Control(
            kl_coef=scalar(cfg.kl_coef) if cfg.adaptive_kl else None,
            moments=moments if cfg.score_scaling != "none" else None,
        )
        averages = cfg.ema.enable
        return cls(control, start_ema(roles.actor, offload=cfg.ema.offload) if averages else None)


def train(
    run: Run,
    roles: Roles,
    engine: HybridEngine,
    programs: Programs,
    host: HostScorer,
    data: PromptData,
    evaluator: Evaluator,
    num_steps: int,
) -> tuple[Roles, EMA | None]:
    """The PPO loop; starts after the last checkpoint on a resume."""
    beside = Companions.create(run.cfg.ppo, roles, engine.compute)
    with run.checkpoints("ppo") as checkpoints, ExitStack() as stack:
        start = (checkpoints.latest_step() if run.cfg.resume else None) or 0
        bar = stack.enter_context(
            progress("ppo", num_steps, done=start, every=run.cfg.log_interval)
        )
        if start:
            check_same_rows("ppo", checkpoints.meta(start), data.fingerprints)
        run.begin("ppo", start or None)
        with run.timer.phase("evaluate"):
            before = evaluator.measure(0, roles)  # also what later answers are shown beside
        if not start:
            run.log("ppo", 0, before)
        else:
            trained = roles.actor, roles.critic, beside
            actor, critic, beside = checkpoints.restore(start, trained, free=True)
            roles = replace(roles, actor=actor, critic=critic)
        if start == num_steps:  # its row was written before the interruption
            evaluator.measure(start, roles, averaged(beside, roles))
        for step in range(start, num_steps):
            batches, control, metrics = collect(
                run, roles, beside.control, engine, programs, host, data, step
            )
            with run.timer.phase("update") as wait:
                roles, ema, all_losses = update(
                    run, roles, beside.ema, engine, programs, data, batches, step
                )
                beside = Companions(control, ema)
                wait.append(all_losses)
            done = step + 1
            metrics |= means(all_losses)
            # Before any update the new log-probabilities are the training graph's of the policy
            # that sampled: what differs is the sampler's arithmetic, and what adapters drop.
            first = all_losses[0]["policy/abs_log_ratio"]
            if not run.cfg.ppo.actor_lora.drops:
                metrics.setdefault("rollout/logprob_diff_mean", first)
            metrics |= throughput(run, engine.cfg, data, batches, metrics)
            if run.due(run.cfg.eval_interval, done, num_steps):
                with run.timer.phase("evaluate"):
                    metrics |= evaluator.measure(done, roles, averaged(beside, roles))
            values = run.log("ppo", done, metrics)
            bar.update(done, {name: values[metric] for name, metric in SHOWN.items()})
            stopping = run.should_stop(logged=True)
            if stopping or run.due(run.cfg.save_interval, done, num_steps):
                meta = {"stage": "ppo", "step": done} | data.fingerprints
                checkpoints.save(done, (roles.actor, roles.critic, beside), meta)
            if stopping:
                checkpoints.wait()
                run.stop("ppo", done)
    return roles, beside.ema


def averaged(beside: Companions, roles: Roles) -> Any:
    """The averaged actor in the dtype of the actor, where there is one."""
    return None if beside.ema is None else average_params(beside.ema, roles.actor)


def collect(
    run: Run,
    roles: Roles,
    control: Control,
    engine: HybridEngine,
    programs: Programs,
    host: HostScorer,
    data: PromptData,
    step: int,
) -> tuple[list[Scored], Control, dict[str, Any]]:
    """Generates and scores the batches of one iteration; metrics are means over their rows."""
    cfg, packing = run.cfg.ppo, RowPacking.create(run.cfg.ppo, engine.compute, data.max_prompt)
    policy = engine.pin(roles.policy) if cfg.pin_rollout else roles.policy
    scorers = Scorers(roles.policy, roles.reference, roles.value_model, roles.reward)
    batches, all_metrics, all_scores, num_valid = [], [], [], []
    for part in range(cfg.generation_batches):
        prompts = data.train.batch(step * cfg.generation_batches + part)
        with run.timer.phase("generate") as wait:
            key = run.key(step, f"generate/{part}")
            rollout = engine.generate(policy, prompts, cfg.sampling, key=key)
            wait.append(rollout)
        with run.timer.phase("score") as wait:
            scores = host.score(prompts, data.rows, rollout, roles.text_reward)
            sizes = packing.sizes(prompts, rollout)
            rows, places, saved = packing.score(prompts, sizes)
            experience, control, metrics = programs.score(
                scorers, put_batch(rows, engine.compute), rollout,
                scores and put_rows(scores.total_B, engine.compute, "batch"), control,
                put_batch(places, engine.compute),
            )  # fmt: skip
            wait.append(metrics)
        batches.append(Scored(experience, prompts.valid_B, sizes))
        all_metrics.append(metrics | saved)
        all_scores.append(scores)
        num_valid.append(prompts.valid_B.sum())
    return batches, control, means(all_metrics, num_valid) | host.metrics(all_scores)


def update(
    run: Run,
    roles: Roles,
    ema: EMA | None,
    engine: HybridEngine,
    programs: Programs,
    data: PromptData,
    batches: list[Scored],
    step: int,
) -> tuple[Roles, EMA | None, list[Metrics]]:
    """The optimizer steps of one iteration, each with its own batch of pretraining text."""
    cfg, layout = run.cfg.ppo, engine.compute
    packing = RowPacking.create(cfg, layout, data.max_prompt)
    stopped, all_losses = jnp.bool_(False), []
    for n, (batch, rows) in enumerate(minibatches(cfg, batches, run.cfg.seed, step)):
        number = step * cfg.updates_per_iteration + n
        text = None if data.ptx is None else put_batch(data.ptx.batch(number), layout)
        rows, places, saved = packing.minibatch(rows, batch)
        actor, critic, stopped, losses = programs.update(
            roles.actor, roles.critic, batch.experience, put_rows(rows, layout, None), stopped,
            text, frozen=roles.frozen, key=roles.dropout_key, places=put_batch(places, layout),
        )  # fmt: skip
        roles = replace(roles, actor=actor, critic=critic)
        if ema is not None and cfg.ema.per == "minibatch":
            taken = losses["val/skipped"] + losses["val/stopped"] == 0
            ema = programs.average(ema, roles.actor, taken)
        all_losses.append(losses | saved)
    if ema is not None and cfg.ema.per == "iteration":
        ema = programs.average(ema, roles.actor)
    return roles, ema, all_losses


def means(rows: list[Metrics], weights: Sequence[float] | None = None) -> Metrics:
    """Each metric's mean over several programs' outputs; of `/min` and `/max` the least and the
    largest.
    """
    shares = np.ones(len(rows)) if weights is None else np.asarray(weights)
    shares = jnp.asarray(shares / shares.sum(), jnp.float32)
    extremes = {"min": jnp.min, "max": jnp.max}

    def of(name: str) -> jax.Array:
        values = jnp.stack([row[name] for row in rows])
        extreme = extremes.get(name.rpartition("/")[2])
        return (values * shares).sum() if extreme is None else extreme(values)

    return {name: of(name) for name in rows[0]}
