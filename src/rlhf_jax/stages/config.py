"""The one frozen config of a run. Every field is a dotted flag and a YAML key."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.engine.optimizer import OptimizerConfig, Schedule
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.models.decoder import Remat
from rlhf_jax.objectives.experience import RewardSettings

StageName = Literal["sft", "reward", "ppo"]
STAGE_NUMBERS: dict[int, StageName] = {1: "sft", 2: "reward", 3: "ppo"}


def check_at_least(owner: object, minimum: float, *names: str) -> None:
    """ValueError naming the first of these fields below `minimum` (None passes)."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class SupervisedConfig:
    """What steps 1 and 2 share."""

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    lr_scheduler_type: Schedule = "cosine"
    num_warmup_steps: int = 0
    final_lr_fraction: float = 0.0
    """Where linear and cosine schedules end, as a share of the learning rate."""
    adam_beta2: float = 0.95
    batch_size: int = 64
    """Rows (step 2: pairs) of one optimizer step, over all devices."""
    gradient_accumulation_steps: int = 1
    """Parts that a batch is cut into; changes memory, not the result."""
    num_train_epochs: int = 1
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever the epochs say."""
    max_seq_len: int = 512
    remat: Remat = "full"
    """What the backward pass computes again: nothing, a whole layer, or all but products."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "gradient_accumulation_steps", "num_train_epochs")
        check_at_least(self, 1, "max_steps", "max_seq_len")
        check_at_least(self, 0, "learning_rate", "weight_decay", "num_warmup_steps")
        check_parts("batch_size", self.batch_size, self.gradient_accumulation_steps)
        _ = self.optimizer

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW with these settings."""
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            schedule=self.lr_scheduler_type,
            warmup_steps=self.num_warmup_steps,
            final_fraction=self.final_lr_fraction,
            weight_decay=self.weight_decay,
            beta2=self.adam_beta2,
        )


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Step 1, supervised fine-tuning."""

    learning_rate: float = 9.65e-6
    loss_on: Literal["all", "completion"] = "all"
    """Tokens that carry loss: all, as DeepSpeed-Chat, or the answer's only."""


@dataclass(frozen=True)
class RewardConfig(SupervisedConfig):
    """Step 2, the reward model, from pairs of a better and a worse answer."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.1
    span: Literal["last", "divergence"] = "last"
    """Where the two scores are compared: at the last token, or at every position from where the
    answers part, as DeepSpeed-Chat."""
    center_coef: float = 0.01
    """Weight of the squared score, which keeps scores near 0."""
    train_from: Literal["reward_model", "actor"] = "reward_model"
    """Start from --reward-model, or from the model that step 1 trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "center_coef")


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
    """Where linear and cosine schedules end, as a share of the learning rate."""
    adam_beta2: float = 0.95
    batch_size: int = 64
    """Prompts answered in one generation, over all devices."""
    minibatch_size: int | None = None
    """Rows of one optimizer step, a divisor of `batch_size`; None: all of it."""
    gradient_accumulation_steps: int = 1
    generation_batches: int = 1
    """Batches that are answered before an update phase."""
    ppo_epochs: int = 1
    """Passes over the experience of an iteration."""
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
    kl_coef: float = 0.1
    kl_kind: Literal["k1", "k3"] = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2
    value_clip_range: float = 0.2
    value_coef: float = 1.0
    entropy_coef: float = 0.0
    score_clip: float | None = 5.0
    standardize_score: bool = True
    """Scores in units of the reward model's mean and deviation on its training answers."""
    missing_eos_penalty: float | None = None
    """Taken off the score of an answer that reached the length limit."""
    whiten_advantages: bool = True
    train_eos: bool = True
    """The action that ends an answer is trained too (DeepSpeed-Chat leaves it out)."""
    reset_critic_head: bool = False
    """Start the critic's head at zero instead of at the reward model's."""
    old_logprobs: Literal["rollout", "train"] = "rollout"
    """Where the old log-probabilities come from: the sampler's own, or one more forward pass."""
    target_kl: float | None = None
    """Leave out the rest of an update phase once the mean KL to the rollout policy exceeds it."""
    pin_rollout: bool = False
    """Keep the gathered rollout copy of the actor between the generations of an iteration."""
    num_eval_prompts: int = 64
    """Held-out prompts answered at every evaluation."""
    remat: Remat = "full"

    def __post_init__(self) -> None:
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
        check_at_least(self, 0, "clip_range", "value_clip_range", "value_coef", "entropy_coef")
        if self.batch_size % self.rows_per_step:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} must divide batch_size={self.batch_size}: "
                "a minibatch never mixes two generated batches"
            )
        check_parts("minibatch_size", self.rows_per_step, self.gradient_accumulation_steps)
        _ = self.sampling, self.reward_settings, self.optimizer("actor"), self.optimizer("critic")

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
        )

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
            weight_decay=self.actor_weight_decay if actor else self.critic_weight_decay,
            beta2=self.adam_beta2,
        )


def check_parts(name: str, rows: int, parts: int) -> None:
    """ValueError unless `gradient_accumulation_steps` divides a batch; names what would."""
    if rows % parts:
        allowed = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"gradient_accumulation_steps={parts} does not divide {name}={rows}: "
            f"use one of {allowed}"
        )


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    step: tuple[int, ...] = (1, 2, 3)
    """Stages to run: 1 supervised fine-tuning, 2 reward model, 3 PPO."""
    output_dir: str = "runs/quickstart"
    """Where the run leaves everything; must be new or empty."""
    actor_model: str = "quickstart"
    """A directory, a Hub name, or `quickstart`: the built-in tiny model, from scratch."""
    reward_model: str = "quickstart"
    """What the reward model starts from; critic and reward of step 3 where step 2 has not run."""
    mesh: str | None = None
    """FxT or RxFxT; None: all visible GPUs, or min(cores, 2) simulated CPU devices, as Nx1."""
    inference_tp_size: int | None = None
    """Tensor parallelism of decoding; None: the largest that divides devices and heads."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the working parameters and the computation; masters and moments are float32."""
    seed: int = 1234
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    log_interval: int = 10
    """Steps between rows of metrics in steps 1 and 2; PPO writes one every iteration."""
    eval_interval: int = 0
    """Steps between held-out evaluations; 0: only before and after each stage."""
    eval_batches: int = 8
    """Held-out batches of an evaluation of steps 1 and 2."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end of each stage."""
    save_total_limit: int = 2
    resume: bool = False
    """Go on with the run in `output_dir`."""
    overwrite_output_dir: bool = False
    """Delete an earlier run in `output_dir`."""

    def __post_init__(self) -> None:
        if not self.step or any(number not in STAGE_NUMBERS for number in self.step):
            raise ValueError(f"--step takes any of 1, 2 and 3, got {self.step}")
        if list(self.step) != sorted(set(self.step)):
            raise ValueError(f"--step must name each stage once and in order, got {self.step}")
        if self.resume and self.overwrite_output_dir:
            raise ValueError("--resume and --overwrite-output-dir contradict each other: use one")
        check_at_least(self, 1, "log_interval", "save_total_limit", "eval_batches")
        check_at_least(self, 0, "eval_interval", "save_interval")

    @property
    def stages(self) -> tuple[StageName, ...]:
        return tuple(STAGE_NUMBERS[number] for number in self.step)
