"""The one frozen config of a run. Every field is a dotted flag and a YAML key."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ranges import check_at_least
from rlhf_jax.stages.supervised_config import RewardConfig, SFTConfig

StageName = Literal["sft", "reward", "ppo"]
STAGE_NUMBERS: dict[int, StageName] = {1: "sft", 2: "reward", 3: "ppo"}


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
