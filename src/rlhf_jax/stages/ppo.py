"""Step 3: PPO against the reward model. One iteration = generate, score, update."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.reshard import put_batch, put_rows
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.ppo_step import (
    Scorers,
    ScoringSettings,
    UpdateSettings,
    ppo_update,
    score_rollout,
)
from rlhf_jax.engine.step import Metrics
from rlhf_jax.hf.export import save_hf, save_reward_hf
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.objectives.experience import Experience
from rlhf_jax.runtime.log import progress, say
from rlhf_jax.runtime.profile import deepspeed_flops
from rlhf_jax.stages.evaluate import Evaluator
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.prompts import PromptData, ppo_data
from rlhf_jax.stages.reward import read_statistics
from rlhf_jax.stages.roles import Cast, Roles, load_roles
from rlhf_jax.stages.run import Run

SHOWN = ("objective/scores", "objective/kl", "response_length/mean", "policy/clipfrac_avg")


def run_ppo(run: Run, actor: Pretrained, reward: Pretrained) -> None:
    """Trains the actor and leaves it in `actor/`, the critic in `critic/`."""
    cfg = run.cfg.ppo
    data = ppo_data(run, actor)
    num_batches = cfg.num_train_epochs * data.train.num_batches
    num_steps = cfg.max_steps or -(-num_batches // cfg.generation_batches)
    with jax.set_mesh(run.mesh):
        roles, cast = load_roles(run, actor, reward, num_steps * cfg.updates_per_iteration)
        engine = HybridEngine(actor.cfg, run.mesh, actor.cfg.stop_ids)
        programs = Programs.create(cfg, cast, reward)
        evaluator = Evaluator(run, engine, programs.score_evaluation, data, actor)
        roles = train(run, roles, engine, programs, data, evaluator, num_steps)
        save_hf(
            run.export_dir("actor"), roles.actor.params, actor.cfg, run.cfg.dtype,
            actor.tokenizer, actor.source_config,
        )  # fmt: skip
        save_reward_hf(
            run.export_dir("critic"), roles.critic.params, reward.cfg, run.cfg.dtype,
            reward.tokenizer, reward.source_config,
        )  # fmt: skip
    results = evaluator.comparison()
    run.finish_stage("ppo", results | {"steps": num_steps, "skipped": int(roles.actor.skipped)})


@dataclass(frozen=True)
class Programs:
    """The compiled programs of an iteration, beside the engine's generate."""

    score: Any
    score_evaluation: Any
    update: Any

    @classmethod
    def create(cls, cfg: PPOConfig, cast: Cast, reward: Pretrained) -> "Programs":
        """Jitted: they compile at first use, once per prompt bucket."""
        mean, std = read_statistics(reward) if cfg.standardize_score else (0.0, 1.0)
        temperature = cfg.sampling.score_temperature
        scoring = ScoringSettings(
            reward=cfg.reward_settings,
            temperature=temperature,
            score_mean=mean,
            score_std=std,
            recompute_logprobs=cfg.old_logprobs == "train",
        )
        settings = UpdateSettings(
            temperature=temperature,
            clip_range=cfg.clip_range,
            value_clip_range=cfg.value_clip_range,
            value_coef=cfg.value_coef,
            entropy_coef=cfg.entropy_coef,
            target_kl=cfg.target_kl,
            num_parts=cfg.gradient_accumulation_steps,
            remat=cfg.remat,
        )
        # Evaluation samples at temperature 1 and greedily, whatever training does.
        plain = replace(scoring, temperature=1.0, recompute_logprobs=False)
        score, score_evaluation = (
            jax.jit(partial(score_rollout, actor=cast.actor, critic=cast.critic, settings=each))
            for each in (scoring, plain)
        )
        update = partial(
            ppo_update,
            actor_place=cast.actor,
            critic_place=cast.critic,
            optimizers=cast.optimizers,
            settings=settings,
        )
        evaluation = score if plain == scoring else score_evaluation
        return cls(score, evaluation, jax.jit(update, donate_argnums=(0, 1)))


def train(
    run: Run,
    roles: Roles,
    engine: HybridEngine,
    programs: Programs,
    data: PromptData,
    evaluator: Evaluator,
    num_steps: int,
) -> Roles:
    """The PPO loop; starts after the last checkpoint on a resume."""
    cfg, layout = run.cfg.ppo, engine.compute
    with run.checkpoints("ppo") as checkpoints, ExitStack() as stack:
        start = (checkpoints.latest_step() if run.cfg.resume else None) or 0
        bar = stack.enter_context(
            progress("ppo", num_steps, done=start, every=run.cfg.log_interval)
        )
        run.log("ppo", 0, evaluator.measure(0, roles))
        if start:
            (actor, critic), _ = checkpoints.restore(start, (roles.actor, roles.critic))
            roles = replace(roles, actor=actor, critic=critic)
            say(f"ppo: resumed after step {start}")
        if start == num_steps:  # its row was written before the interruption
            evaluator.measure(start, roles)
        for step in range(start, num_steps):
            experiences, metrics = collect(run, roles, engine, programs, data, step)
            with run.timer.phase("update") as wait:
                stopped, all_losses = jnp.bool_(False), []
                for experience, rows in minibatches(cfg, experiences, run.cfg.seed, step):
                    actor, critic, stopped, losses = programs.update(
                        roles.actor, roles.critic, experience,
                        put_rows(rows, layout, None), stopped,
                    )  # fmt: skip
                    roles = replace(roles, actor=actor, critic=critic)
                    all_losses.append(losses)
                wait.append(all_losses)
            done = step + 1
            # Before any update the new log-probabilities are the training graph's of the policy
            # that sampled: what differs is the sampler's arithmetic.
            metrics |= means(all_losses)
            metrics.setdefault("rollout/logprob_diff_mean", all_losses[0]["policy/abs_log_ratio"])
            metrics |= throughput(run, engine, data)
            if run.due(run.cfg.eval_interval, done, num_steps):
                with run.timer.phase("evaluate"):
                    metrics |= evaluator.measure(done, roles)
            values = run.log("ppo", done, metrics)
            bar.update(done, {name.split("/")[1]: values[name] for name in SHOWN})
            stopping = run.should_stop(logged=True)
            if stopping or run.due(run.cfg.save_interval, done, num_steps):
                checkpoints.save(done, (roles.actor, roles.critic), {"stage": "ppo", "step": done})
            if stopping:
                checkpoints.wait()
                run.stop("ppo", done)
    return roles


def collect(
    run: Run, roles: Roles, engine: HybridEngine, programs: Programs, data: PromptData, step: int
) -> tuple[list[tuple[Experience, np.ndarray]], Metrics]:
    """Generates and scores the batches of one iteration, each with its `valid_B`; metrics are
    means over them.
    """
    cfg = run.cfg.ppo
    policy = engine.pin(roles.actor.params) if cfg.pin_rollout else roles.actor.params
    scorers = Scorers(roles.actor.params, roles.reference, roles.critic.params, roles.reward)
    experiences, all_metrics = [], []
    for part in range(cfg.generation_batches):
        prompts = data.train.batch(step * cfg.generation_batches + part)
        with run.timer.phase("generate") as wait:
            key = run.key(step, f"generate/{part}")
            rollout = engine.generate(policy, prompts, cfg.sampling, key=key)
            wait.append(rollout)
        with run.timer.phase("score") as wait:
            experience, metrics = programs.score(
                scorers, put_batch(prompts, engine.compute), rollout
            )
            wait.append(metrics)
        experiences.append((experience, prompts.valid_B))
        all_metrics.append(metrics)
    return experiences, means(all_metrics)


def means(rows: list[Metrics]) -> Metrics:
    """Each metric's mean over several programs' outputs."""
    return {name: jnp.stack([row[name] for row in rows]).mean() for name in rows[0]}


def minibatches(
    cfg: PPOConfig, experiences: list[tuple[Experience, np.ndarray]], seed: int, step: int
) -> Iterator[tuple[Experience, np.ndarray]]:
    """Which rows of which experience each optimizer step sees, epoch by epoch.

    A minibatch never mixes two generated batches, as in DeepSpeed-Chat; their order and the order
    of their rows are drawn anew in every epoch. One without a valid row is left out.
    """
    for epoch in range(cfg.ppo_epochs):
        rng = np.random.default_rng((seed, step, epoch))
        chunks = [
            (experience, rows)
            for experience, valid_B in experiences
            for rows in rng.permutation(cfg.batch_size).reshape(-1, cfg.rows_per_step)
            if valid_B[rows].any()
        ]
        for n in rng.permutation(len(chunks)):
            yield chunks[n]


def throughput(run: Run, engine: HybridEngine, data: PromptData) -> dict[str, float]:
    """Samples a second by wall clock, and DeepSpeed-Chat's generation and training TFLOP/s."""
    cfg, seconds, elapsed = run.cfg.ppo, run.timer.peek(), run.timer.elapsed()
    rows = cfg.batch_size * cfg.generation_batches
    length = data.max_prompt + cfg.max_answer_seq_len
    devices = run.mesh.size * 1e12
    passes = 3 if cfg.remat == "none" else 4
    model = engine.cfg
    generated = deepspeed_flops(model, rows, length, 1)
    trained = deepspeed_flops(model, rows * cfg.ppo_epochs, length, passes)
    return {
        "perf/samples_per_second": rows / elapsed,
        "perf/generation_tflops_per_device": generated / seconds["generate"] / devices,
        "perf/actor_training_tflops_per_device": trained / seconds["update"] / devices,
    }
