"""The settings of step 3."""

import math
from dataclasses import dataclass, field
from typing import Literal

from rlhf_jax.engine.ema import EMAConfig
from rlhf_jax.engine.optimizer import MomentsDtype, Optim, OptimizerConfig, Schedule
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.decoder import Remat
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.objectives.adaptive import AdaptiveKL
from rlhf_jax.objectives.experience import RewardSettings
from rlhf_jax.objectives.rollout_correction import DEFAULT_THRESHOLD
from rlhf_jax.stages.ranges import check_at_least, check_kinds, check_parts


@dataclass(frozen=True)
class PPOConfig:
    """Step 3, PPO with a critic, against the reward model of step 2."""

    actor_learning_rate: float = 9.65e-6
    critic_learning_rate: float = 5e-6
    actor_weight_decay: float = 0.0
    critic_weight_decay: float = 0.0
    lr_scheduler_type: Schedule = "cosine"
    num_warmup_steps: int = 100
    final_lr_fraction: float = 0.0
    """Where schedules that fall end, as a share of the learning rate."""
    lr_num_cycles: int = 1
    """How often `cosine_with_restarts` starts at the full rate."""
    lr_power: float = 1.0
    """Of the schedule `polynomial`."""
    adam_beta2: float = 0.95
    """Of adamw; lion's second beta too."""
    batch_size: int = 64
    """Prompts answered in one generation, over all devices."""
    minibatch_size: int | None = None
    """Rows of one optimizer step, a divisor of `batch_size`; None: all of it."""
    gradient_accumulation_steps: int = 1
    generation_batches: int = 1
    """Batches that are answered before an update phase."""
    ppo_epochs: int = 1
    """Passes over the experience of an iteration."""
    rollout_slots: int | None = None
    """The most rows that decode at once: an answer that ends makes room for the next prompt; None:
    the whole batch. It pays where lengths differ much and batches are several times larger; the
    answers stay the same. A run whose keys and values do not fit lowers it, and says so."""
    rollout_weights: Narrow = "same"
    """Decode with the layers' matrices rounded to one byte a number, a scale a row: int8, or fp8
    (e4m3)."""
    rollout_kv_cache: Narrow = "same"
    """The same for keys and values while decoding, a scale for each token and head."""
    rollout_is_threshold: float | None = None
    """Weight each token's policy loss by its probability in training over that in the rollout, cut
    off here (truncated importance sampling; `old_logprobs` are then training's); None: 2 where
    rollouts are rounded, no weights elsewhere; 0: no weights."""
    packing: bool = False
    """Score and update on sequences of several rows: prompts and answers that are shorter than
    they may be do not pay for padding."""
    num_train_epochs: int = 1
    max_steps: int | None = None
    """Iterations (generate, score, update); None: as many as the prompts of the epochs give."""
    max_prompt_seq_len: int = 256
    max_answer_seq_len: int = 256
    min_answer_len: int = 0
    max_prompt_buckets: int = 4
    """Prompt lengths that programs are compiled for; short prompts do not pay for long ones."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability; 0: off."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of the prompt and the answer so far become less likely."""
    kl_coef: float = 0.1
    adaptive_kl_target: float | None = None
    """Steer the KL of an answer (nats) to this value: `kl_coef` is where the coefficient starts."""
    adaptive_kl_horizon: int = 10000
    """Answers within which the adaptive coefficient follows; smaller is faster."""
    kl_kind: Literal["k1", "k3"] = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2
    value_clip_range: float = 0.2
    value_coef: float = 1.0
    entropy_coef: float = 0.0
    score_clip: float | None = 5.0
    """Scores above it, or below its negative, are rewarded as it is; also those of functions."""
    standardize_score: bool = True
    """Scores in units of the reward model's mean and deviation on its training answers."""
    reward_model_weight: float = 1.0
    """What the reward model's score counts in the sum with reward functions; 0: they score alone,
    and no reward model is loaded."""
    reward_fn: tuple[str, ...] = ()
    """Functions that score answers: `module:function` or `path/to/file.py:function`."""
    reward_fn_weights: tuple[float, ...] = ()
    """What the score of each counts, in their order; none given: 1 each."""
    score_scaling: Literal["none", "running_std", "running_mean_std"] = "none"
    """Divide rewarded scores by the deviation of all scores so far, or take their mean off too."""
    missing_eos_penalty: float | None = None
    """Taken off the score of an answer that reached the length limit."""
    whiten_advantages: bool = True
    train_eos: bool = True
    """The action that ends an answer is trained too (DeepSpeed-Chat leaves it out)."""
    critic_from: Literal["reward_model", "actor"] = "reward_model"
    """What the critic starts from; the actor, with a head of zeros, where no reward model is
    loaded."""
    reset_critic_head: bool = False
    """Start the critic's head at zero instead of at the reward model's."""
    old_logprobs: Literal["rollout", "train"] = "rollout"
    """Where the old log-probabilities come from: the sampler's own, or one more forward pass."""
    target_kl: float | None = None
    """Leave out the rest of an update phase once the mean KL to the rollout policy exceeds it; the
    learning rate falls as planned."""
    pin_rollout: bool = False
    """Keep the gathered rollout copy of the actor between the generations of an iteration."""
    ptx_coef: float = 0.0
    """Weight of the cross-entropy on pretraining text beside the actor's loss; 0: off."""
    ptx_path: str | None = None
    """The pretraining text: a source of rows with a `text` column, or a .txt file."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    frozen_dtype: Literal["bfloat16", "float32"] | None = None
    """Of reference and reward model; None: that of --dtype."""
    offload: bool = False
    """Keep masters and moments of actor and critic in host memory; they visit the devices layer by
    layer in every update."""
    optim: Optim = "adamw"
    moments_dtype: MomentsDtype = "float32"
    """Of what adamw and lion keep for each parameter; bfloat16 rounds stochastically."""
    offload_reference_model: bool = False
    """Keep the reference model in host memory; its layers visit the devices one by one."""
    offload_reward_model: bool = False
    """The same for the reward model."""
    num_eval_prompts: int = 64
    """Held-out prompts answered at every evaluation."""
    actor_lora: LoRAConfig = field(default_factory=LoRAConfig)
    critic_lora: LoRAConfig = field(default_factory=LoRAConfig)
    merge_lora: bool = False
    """Generate with the adapters merged into a copy of their weights; unmerged, updates below the
    spacing of bfloat16 count too."""
    remat: Remat = "full"
    """What the backward pass computes anew (docs/memory.md): auto, as little as memory allows."""

    def __post_init__(self) -> None:
        check_kinds(self)
        check_at_least(self, 1, "batch_size", "minibatch_size", "gradient_accumulation_steps")
        check_at_least(self, 1, "max_prompt_buckets", "max_prompt_seq_len", "max_answer_seq_len")
        check_at_least(self, 0, "num_eval_prompts", "target_kl", "min_answer_len")
        check_at_least(self, 0, "actor_learning_rate", "critic_learning_rate", "num_warmup_steps")
        if self.min_answer_len > self.max_answer_seq_len:
            raise ValueError(
                f"min_answer_len={self.min_answer_len} exceeds "
                f"max_answer_seq_len={self.max_answer_seq_len}: lower it"
            )
        check_at_least(self, 1, "generation_batches", "ppo_epochs", "num_train_epochs", "max_steps")
        check_at_least(self, 1, "rollout_slots")
        check_at_least(self, 0, "clip_range", "value_clip_range", "value_coef", "entropy_coef")
        check_at_least(self, 0, "ptx_coef", "reward_model_weight", "rollout_is_threshold")
        if 0 < (self.rollout_is_threshold or 0) < 1:
            raise ValueError(
                f"rollout_is_threshold={self.rollout_is_threshold} would only scale the policy's "
                "loss down: use at least 1 (2 is usual), or 0 for no weights"
            )
        if self.offload_reward_model and not self.reward_model_weight:
            raise ValueError(
                "offload_reward_model: with reward_model_weight=0 no reward model is loaded, leave "
                "it out"
            )
        check_reward_weights(self)
        if self.target_kl is not None and self.actor_lora.drops:
            raise ValueError(
                f"target_kl={self.target_kl} with actor_lora.dropout={self.actor_lora.dropout}: "
                "dropout alone moves the policy by that much; leave one of them out"
            )
        if bool(self.ptx_coef) != (self.ptx_path is not None):
            raise ValueError(
                f"ptx_coef={self.ptx_coef} and ptx_path={self.ptx_path}: pretraining text is mixed "
                "in with both, a coefficient above 0 and a path, or with neither"
            )
        if self.batch_size % self.rows_per_step:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} must divide batch_size={self.batch_size}: "
                "a minibatch never mixes two generated batches"
            )
        check_parts("minibatch_size", self.rows_per_step, self.gradient_accumulation_steps)
        _ = self.sampling, self.reward_settings, self.optimizer("actor"), self.optimizer("critic")
        _ = self.adaptive_kl

    @property
    def rows_per_step(self) -> int:
        return self.minibatch_size or self.batch_size

    @property
    def updates_per_iteration(self) -> int:
        rows = self.batch_size * self.generation_batches
        return self.ppo_epochs * (rows // self.rows_per_step)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(
            max_new_tokens=self.max_answer_seq_len,
            min_new_tokens=self.min_answer_len,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def narrow_rollouts(self) -> str:
        """What rollouts round, for a line to the user; empty where they do not."""
        parts = {"weights": self.rollout_weights, "KV cache": self.rollout_kv_cache}
        return " and ".join(f"{kind} {what}" for what, kind in parts.items() if kind != "same")

    @property
    def is_threshold(self) -> float | None:
        """Where importance weights are cut off; None: there are none."""
        if self.rollout_is_threshold is None:
            return DEFAULT_THRESHOLD if self.narrow_rollouts else None
        return self.rollout_is_threshold or None

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether old log-probabilities are the training graph's."""
        return self.old_logprobs == "train" or self.is_threshold is not None

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        if self.adaptive_kl_target is None:
            return None
        if not self.kl_coef:
            raise ValueError(
                f"adaptive_kl_target={self.adaptive_kl_target} multiplies kl_coef, which is 0 and "
                "would stay so: start from a coefficient above 0"
            )
        return AdaptiveKL(self.adaptive_kl_target, self.adaptive_kl_horizon)

    @property
    def reward_settings(self) -> RewardSettings:
        return RewardSettings(
            kl_coef=self.kl_coef,
            kl_kind=self.kl_kind,
            score_clip=self.score_clip,
            gamma=self.gamma,
            lam=self.lam,
            whiten_advantages=self.whiten_advantages,
            train_eos=self.train_eos,
            missing_eos_penalty=self.missing_eos_penalty,
        )

    def optimizer(self, who: Literal["actor", "critic"]) -> OptimizerConfig:
        actor = who == "actor"
        return OptimizerConfig(
            learning_rate=self.actor_learning_rate if actor else self.critic_learning_rate,
            schedule=self.lr_scheduler_type,
            warmup_steps=self.num_warmup_steps,
            final_fraction=self.final_lr_fraction,
            num_cycles=self.lr_num_cycles,
            power=self.lr_power,
            weight_decay=self.actor_weight_decay if actor else self.critic_weight_decay,
            beta2=self.adam_beta2,
            optim=self.optim,
            moments_dtype=self.moments_dtype,
        )


def check_reward_weights(cfg: PPOConfig) -> None:
    """ValueError where nothing scores the answers, or weights and functions do not pair."""
    if not cfg.reward_model_weight and not cfg.reward_fn:
        raise ValueError(
            "reward_model_weight=0 and no reward_fn: nothing scores the answers; give functions, "
            "or a weight above 0"
        )
    weights, functions = len(cfg.reward_fn_weights), len(cfg.reward_fn)
    if weights and weights != functions:
        raise ValueError(
            f"reward_fn_weights has {weights} weights for {functions} functions of reward_fn: "
            "give one for each, or none"
        )
    infinite = [weight for weight in cfg.reward_fn_weights if not math.isfinite(weight)]
    if infinite or not math.isfinite(cfg.reward_model_weight):
        raise ValueError("reward_model_weight and reward_fn_weights must be finite")
