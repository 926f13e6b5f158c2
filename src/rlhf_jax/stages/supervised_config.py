"""The settings of steps 1, 2 and dpo."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf_jax.engine.optimizer import MomentsDtype, Optim, OptimizerConfig, Schedule
from rlhf_jax.models.decoder import Remat
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.stages.ranges import check_at_least, check_parts


@dataclass(frozen=True)
class SupervisedConfig:
    """What steps 1, 2 and dpo share."""

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    lr_scheduler_type: Schedule = "cosine"
    num_warmup_steps: int = 0
    final_lr_fraction: float = 0.0
    """Where schedules that fall end, as a share of the learning rate."""
    lr_num_cycles: int = 1
    """How often `cosine_with_restarts` starts at the full rate."""
    lr_power: float = 1.0
    """Of the schedule `polynomial`."""
    adam_beta2: float = 0.95
    """Of adamw; lion's second beta too."""
    batch_size: int = 64
    """Rows (step 2 and dpo: pairs) of one optimizer step, over all devices."""
    gradient_accumulation_steps: int = 1
    """Parts that a batch is cut into; changes memory, not the result."""
    num_train_epochs: int = 1
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever the epochs say."""
    max_seq_len: int = 512
    remat: Remat = "full"
    """What the backward pass computes anew (docs/memory.md): auto, as little as memory allows."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    offload: bool = False
    """Keep masters and moments in host memory; they visit the devices layer by layer in every
    update."""
    optim: Optim = "adamw"
    moments_dtype: MomentsDtype = "float32"
    """Of what adamw and lion keep for each parameter; bfloat16 rounds stochastically."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "gradient_accumulation_steps", "num_train_epochs")
        check_at_least(self, 1, "max_steps", "max_seq_len")
        check_at_least(self, 0, "learning_rate", "weight_decay", "num_warmup_steps")
        check_parts("batch_size", self.batch_size, self.gradient_accumulation_steps)
        _ = self.optimizer

    @property
    def optimizer(self) -> OptimizerConfig:
        """The update rule with these settings."""
        return OptimizerConfig(
            learning_rate=self.learning_rate,
            schedule=self.lr_scheduler_type,
            warmup_steps=self.num_warmup_steps,
            final_fraction=self.final_lr_fraction,
            num_cycles=self.lr_num_cycles,
            power=self.lr_power,
            weight_decay=self.weight_decay,
            beta2=self.adam_beta2,
            optim=self.optim,
            moments_dtype=self.moments_dtype,
        )


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Step 1, supervised fine-tuning."""

    learning_rate: float = 9.65e-6
    loss_on: Literal["all", "completion"] = "all"
    """Tokens that carry loss: all, as DeepSpeed-Chat, or the answer's only."""
    packing: bool = False
    """Put several rows into one sequence where they are short. A step still has `batch_size` rows,
    on average, and each gives the loss that it gives alone."""


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
    packing: bool = False
    """Put several pairs into one sequence. A step still has `batch_size` pairs, on average, and
    each gives the loss that it gives alone. Needs span=last."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "center_coef")
        if self.packing and self.span != "last":
            raise ValueError(
                f"packing compares scores at the last tokens and span is {self.span}: use "
                "span=last, or no packing"
            )


@dataclass(frozen=True)
class DPOConfig(SupervisedConfig):
    """Step dpo, direct preference optimization: from pairs, without a reward model.

    Its rate is far below that of step 1: the loss has no term that keeps the answers likely, only
    their distance to the reference, and larger rates make both answers of a pair improbable.
    """

    learning_rate: float = 1e-6
    beta: float = 0.1
    """Scale of the implied reward; a larger one stays closer to the reference."""
    label_smoothing: float = 0.0
    """The share of pairs that is taken to be labelled the wrong way round, below 0.5."""
    frozen_dtype: Literal["bfloat16", "float32"] | None = None
    """Of the reference model; None: that of --dtype."""
    offload_reference_model: bool = False
    """Keep the reference model in host memory; its layers visit the devices one by one."""
    num_eval_prompts: int = 64
    """Held-out prompts answered before and after; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "num_eval_prompts")
        if self.beta <= 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: from 0.5 on "
                "the rejected answers would be preferred"
            )
