"""PPO from Python: one iteration a call, on prompts that the caller brings."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshes.reshard import put_batch, put_rows
from rlhf_jax.data.batches import collate_prompts
from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.optimizer import OptimizerConfig, Rates, learning_rates, make_optimizer
from rlhf_jax.engine.ppo_step import Scorers
from rlhf_jax.engine.row_passes import ModelOnMesh
from rlhf_jax.engine.state import create_state
from rlhf_jax.inference.rows import Text, bucket, encode
from rlhf_jax.inference.session import Model
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.params import (
    Params,
    ScalarModel,
    compute_layout,
    param_specs,
    scalar_specs,
)
from rlhf_jax.stages.ppo import Companions, Programs, means
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ppo_rows import RowPacking, Scored, minibatches
from rlhf_jax.stages.reward_calls import shown
from rlhf_jax.stages.reward_functions import GIVEN, RewardFunction, check_takes
from rlhf_jax.stages.reward_plan import RewardPlan, token_difference
from rlhf_jax.stages.roles import Cast, Roles
from rlhf_jax.stages.scores import HostScorer
from rlhf_jax.stages.statistics_file import read_statistics
from rlhf_jax.stages.trainable import copied

type Reward = Model | Callable[..., Any]

RUN_ONLY = (
    "generation_batches", "reward_fn", "reward_fn_weights", "reward_model_weight", "critic_from",
    "ema", "ptx_coef", "ptx_path", "actor_lora", "critic_lora", "merge_lora", "pin_rollout",
    "frozen_dtype", "offload", "offload_reference_model", "offload_reward_model",
)  # fmt: skip
"""Settings that change what a run trains and that `PPO` does not have."""


class PPO:
    """Step 3 of a run, one `step(prompts)` at a time.

    The policy is taken over, not copied: an update writes into the buffers of `policy.params`, so
    `policy.generate` and `policy.save_hf` always mean the policy as it is now, and arrays or
    streamers that were taken from it before a step are gone. What it was at first is kept as the
    reference; the critic starts as a copy of the reward model, or of the policy with a head of
    zeros where a function scores.

    Attributes:
        policy: the model that trains.
        roles: actor, critic, reference and reward model with their optimizer states.
        num_steps: steps taken.
    """

    policy: Model
    roles: Roles
    num_steps: int

    def __init__(self, policy: Model, reward: Reward, config: PPOConfig, *, seed: int = 0) -> None:
        """`reward` is a reward model on the policy's mesh, or a function as --ppo.reward-fn has
        them: `f(prompts, completions, completion_ids, **columns)`, a number for each answer.

        `config.batch_size` is how many prompts a step may have. `seed` makes the answers.

        Raises:
            ValueError: models that do not belong together, a batch that does not divide over the
                mesh, settings that only a whole run has, a function that cannot be called so.
        """
        check_settings(config)
        judge = reward if isinstance(reward, Model) else None
        check_models(policy, judge, config)
        functions = () if isinstance(reward, Model) else (as_reward_function(reward),)
        self.policy, self.num_steps = policy, 0
        self._config, self._seed = config, seed
        self._encoder = Encoder(policy.tokenizer)
        self._engine = HybridEngine(
            policy.config, policy.mesh, policy.stop_ids, slots=config.rollout_slots,
            weights=config.rollout_weights, kv_cache=config.rollout_kv_cache,
        )  # fmt: skip
        self._host = HostScorer(policy.tokenizer, functions, None, alone=judge is None)
        critic_cfg = replace(policy.config, tie_embeddings=True) if judge is None else judge.config
        source = None if judge is None else judge.source
        plan = RewardPlan(functions, source, by_text=False, critic=source or policy.source)
        cast = make_cast(policy, critic_cfg, config, scored=judge is not None)
        self._programs = Programs.create(config, cast, plan)
        with jax.set_mesh(policy.mesh):
            self.roles = make_roles(policy, judge, cast, config)
            self._control = Companions.create(config, self.roles, self._engine.compute).control

    def step(self, prompts: Sequence[Text], **columns: Sequence[Any]) -> dict[str, float]:
        """Answers the prompts, scores the answers, and updates policy and critic.

        A reward function gets `columns`, one value for each prompt, beside prompts and answers.
        The metrics are those of a run's `metrics.jsonl`.

        Raises:
            ValueError: no prompts, more than `batch_size`, prompts that are too long, or what the
                reward function did wrong.
        """
        cfg, layout = self._config, self._engine.compute
        rows = self._rows(prompts, columns)
        longest = max(len(row.tokens) for row in rows)
        length = bucket(longest, cfg.max_prompt_seq_len)
        batch = collate_prompts(rows, cfg.batch_size, buckets=(length,))
        key = jax.random.fold_in(jax.random.key(self._seed), self.num_steps)
        roles = self.roles
        with jax.set_mesh(self.policy.mesh):
            rollout = self._engine.generate(roles.policy, batch, cfg.sampling, key=key)
            scores = self._host.score(batch, dict(enumerate(rows)), rollout, None)
            extra = scores and put_rows(scores.total_B, layout, "batch")
            models = Scorers(roles.policy, roles.reference, roles.value_model, roles.reward)
            packing = RowPacking.create(cfg, layout, length)
            sizes = packing.sizes(batch, rollout)
            batch, places, saved = packing.score(batch, sizes)
            experience, self._control, metrics = self._programs.score(
                models, put_batch(batch, layout), rollout, extra, self._control,
                put_batch(places, layout),
            )  # fmt: skip
            losses = self._update(Scored(experience, batch.valid_B, sizes), packing)
        metrics |= self._host.metrics([scores]) | means(losses) | saved
        metrics.setdefault("rollout/logprob_diff_mean", losses[0]["policy/abs_log_ratio"])
        self.num_steps += 1
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def _update(self, batch: Scored, packing: RowPacking) -> list[Any]:
        """The optimizer steps on one batch; leaves the new policy in the model."""
        cfg, layout = self._config, self._engine.compute
        stopped, losses = jnp.bool_(False), []
        for _, rows in minibatches(cfg, [batch], self._seed, self.num_steps):
            rows, places, saved = packing.minibatch(rows, batch)
            actor, critic, stopped, values = self._programs.update(
                self.roles.actor, self.roles.critic, batch.experience,
                put_rows(rows, layout, None), stopped, places=put_batch(places, layout),
            )  # fmt: skip
            self.roles = replace(self.roles, actor=actor, critic=critic)
            self.policy.params = actor.params
            losses.append(values | saved)
        return losses

    def _rows(self, prompts: Sequence[Text], columns: dict[str, Sequence[Any]]) -> list[PromptRow]:
        tokens = encode(prompts, self._encoder, self.policy.config.vocab_size)
        cfg = self._config
        if not 1 <= len(tokens) <= cfg.batch_size:
            raise ValueError(
                f"step got {len(tokens)} prompts, batch_size={cfg.batch_size}: give it 1 to "
                f"{cfg.batch_size}"
            )
        for number, row in enumerate(tokens):
            if len(row) > cfg.max_prompt_seq_len:
                raise ValueError(
                    f"prompt {number} has {len(row)} tokens, max_prompt_seq_len="
                    f"{cfg.max_prompt_seq_len}: shorten it or raise max_prompt_seq_len"
                )
        by_name = {name: column_of(name, values, len(tokens)) for name, values in columns.items()}
        return [
            PromptRow(row, number, self._text(prompt), {n: v[number] for n, v in by_name.items()})
            for number, (row, prompt) in enumerate(zip(tokens, prompts, strict=True))
        ]

    def _text(self, prompt: Text) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self.policy.tokenizer.decode(list(prompt), skip_special_tokens=True))


def column_of(name: str, values: Sequence[Any], num_prompts: int) -> list[Any]:
    """A column's values in the order of the prompts: those of a pandas Series by place, not by the
    labels of its index.
    """
    if name in GIVEN:
        raise ValueError(f"reward functions get {name} from the step: give the column another name")
    try:
        listed = None if isinstance(values, str | Set | Mapping) else list(values)
    except TypeError:  # a number, or an array of no dimension, which says that it is iterable
        listed = None
    if listed is None:
        raise ValueError(
            f"column {name} is {shown(values)}: give a list, one value for each prompt"
        )
    if len(listed) != num_prompts:
        raise ValueError(
            f"column {name} has {len(listed)} values for {num_prompts} prompts: give one for each"
        )
    return listed


def make_cast(policy: Model, critic: ModelConfig, config: PPOConfig, *, scored: bool) -> Cast:
    """Where the models compute and how they are optimised; `scored` by a reward model."""
    mesh, num_updates = policy.mesh, (config.max_steps or 1) * config.updates_per_iteration
    configs = config.optimizer("actor"), config.optimizer("critic")

    def rates(optimizer: OptimizerConfig) -> Rates:
        return learning_rates(optimizer, num_updates, None)

    place = ModelOnMesh(critic, compute_layout(critic, mesh))
    return Cast(
        actor=ModelOnMesh(policy.config, compute_layout(policy.config, mesh)),
        critic=place,
        reward=place if scored else None,
        optimizers=(
            make_optimizer(configs[0], param_specs(policy.config), num_updates),
            make_optimizer(configs[1], scalar_specs(critic), num_updates),
        ),
        rates=(rates(configs[0]), rates(configs[1])),
    )


def make_roles(policy: Model, judge: Model | None, cast: Cast, config: PPOConfig) -> Roles:
    """The policy's own buffers as the actor, copies of them as the reference; the critic."""
    assert isinstance(policy.params, Params)
    reward = None if judge is None else judge.params
    assert not isinstance(reward, Params)
    critic = copied(reward or headed(policy.params))
    if config.reset_critic_head:
        critic = replace(critic, head_W=jnp.zeros_like(critic.head_W))
    return Roles(
        actor=create_state(policy.params, cast.optimizers[0]),
        critic=create_state(critic, cast.optimizers[1]),
        reference=copied(policy.params),
        reward=reward,
    )


def headed(params: Params[jax.Array]) -> ScalarModel[jax.Array]:
    """The body of a language model with a scalar head of zeros."""
    table = params.embed_VW
    head_W = jnp.zeros(table.shape[1], table.dtype)
    return ScalarModel(replace(params, unembed_VW=None), head_W)


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """A Python function as one that --ppo.reward-fn names; ValueError where it cannot be called
    with the keywords of one.
    """
    if not callable(function):
        raise ValueError(
            f"the reward is {shown(function)}: pass a reward model or the function itself. "
            "`from my_rewards import score` gets it, or "
            "`rlhf_jax.stages.reward_functions.load_function('my_rewards.py:score')`"
        )
    name = getattr(function, "__name__", type(function).__name__)
    try:
        check_takes(name, function, GIVEN)
    except ValueError as error:  # here nobody gave the flag that it names
        message = str(error).removeprefix("--ppo.reward-fn=")
        raise ValueError(f"the reward function {message}") from error
    return RewardFunction(name, name, 1.0, function)


def check_settings(config: PPOConfig) -> None:
    """ValueError where a setting would do nothing, or a schedule has no end."""
    if not isinstance(config, PPOConfig):
        raise ValueError(f"the config is {shown(config)}: pass rlhf_jax.PPOConfig(…)")
    usual = PPOConfig()
    names = (field.name for field in fields(config))
    wanted = [n for n in names if n in RUN_ONLY and getattr(config, n) != getattr(usual, n)]
    if wanted:
        raise ValueError(
            f"PPO has no {', '.join(wanted)}: leave it as it is, or train with "
            "`python -m rlhf_jax.train`"
        )
    if config.remat == "auto":
        raise ValueError(
            "remat='auto' is chosen by the memory plan of a run, which PPO does not have: use one "
            "of none, dots, mlp, matrices, full"
        )
    if config.max_steps is None and config.lr_scheduler_type != "constant":
        raise ValueError(
            f"lr_scheduler_type={config.lr_scheduler_type!r} falls until max_steps, which is None: "
            "say how many steps there will be, or use lr_scheduler_type='constant'"
        )


def check_models(policy: Model, judge: Model | None, config: PPOConfig) -> None:
    """ValueError where the models do not belong together, or a batch does not fit them."""
    if not isinstance(policy, Model):
        raise ValueError(f"the policy is {shown(policy)}: pass what rlhf_jax.load returns")
    if policy.is_reward_model:
        raise ValueError(f"{policy.name} is a reward model: PPO trains a language model")
    length = config.max_prompt_seq_len + config.max_answer_seq_len
    for model in (policy, judge):
        if model is not None and length > model.config.max_positions:
            raise ValueError(
                f"max_prompt_seq_len={config.max_prompt_seq_len} and max_answer_seq_len="
                f"{config.max_answer_seq_len} make {length} tokens, {model.name} has "
                f"{model.config.max_positions} positions: lower them"
            )
    rows = config.rows_per_step // config.gradient_accumulation_steps
    devices = compute_layout(policy.config, policy.mesh).batch_size_divisor
    if rows % devices:
        raise ValueError(
            f"the mesh shards a batch over {devices} devices, the config gives parts of {rows} "
            f"rows: use a multiple of {devices}"
        )
    if judge is None:
        return
    if not judge.is_reward_model:
        raise ValueError(f"{judge.name} is a language model, it gives no scores: give PPO a reward")
    if judge.mesh != policy.mesh:
        raise ValueError(
            f"{policy.name} and {judge.name} are on two meshes: load both with the same mesh and "
            "inference_tp_size"
        )
    if config.standardize_score:
        check_statistics(judge)
    difference = token_difference(policy.source, judge.source)
    if difference is not None:
        raise ValueError(f"{difference}: use models of one family")


def check_statistics(judge: Model) -> None:
    """ValueError where a reward model came without the scale of its scores."""
    try:
        read_statistics(judge.source)
    except ValueError as error:  # here nobody has the flag that it names
        message = str(error).replace("--ppo.no-standardize-score", "standardize_score=False")
        raise ValueError(message) from error
