"""The one frozen config of a run. Every field is a dotted flag and a YAML key."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.runtime.trackers import TrackerName
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ranges import check_at_least
from rlhf_jax.stages.supervised_config import DPOConfig, RewardConfig, SFTConfig

StageName = Literal["sft", "reward", "ppo", "dpo"]
Step = Literal[1, 2, 3, "dpo"]
STAGES: dict[Step, StageName] = {1: "sft", 2: "reward", 3: "ppo", "dpo": "dpo"}
"""What each value of `--step` runs."""


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    step: tuple[Step, ...] = (1, 2, 3)
    """Stages to run: 1 supervised fine-tuning, 2 reward model, 3 PPO; `dpo` in place of 2 and 3."""
    output_dir: str = "runs/quickstart"
    """Where the run leaves everything; must be new or empty."""
    actor_model: str = "quickstart"
    """A directory, a Hub name, or `quickstart`: the built-in tiny model, from scratch."""
    reward_model: str = "quickstart"
    """What the reward model starts from; critic and reward of step 3 where step 2 has not run."""
    mesh: str | None = None
    """FxT or RxFxT; None: all visible GPUs, or min(cores, 2) simulated CPU devices, as Nx1."""
    inference_tp_size: int | None = None
    """Tensor parallelism of decoding; None: what is fastest on GPUs, on a CPU the largest."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the working parameters and the computation; masters and moments are float32."""
    seed: int = 1234
    deterministic: bool = False
    """Use only GPU operations that give the same bits in every run; some are slower."""
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    log_interval: int = 10
    """Steps between rows of metrics in steps 1, 2 and dpo; PPO writes one every iteration."""
    eval_interval: int = 0
    """Steps between held-out evaluations; 0: only before and after each stage."""
    eval_batches: int = 8
    """Held-out batches of an evaluation of steps 1, 2 and dpo."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end of each stage."""
    save_total_limit: int = 2
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the rows of metrics.jsonl too; each is an extra of the package."""
    project: str | None = None
    """How W&B and trackio file the run; None: `rlhf-jax`."""
    run_name: str | None = None
    """What W&B and trackio call the run; None: the name of `output_dir`."""
    tensorboard_path: str | None = None
    """Where TensorBoard's event files go; None: `tensorboard/` in `output_dir`."""
    resume: bool = False
    """Go on with the run in `output_dir` from its last checkpoint; ctrl-C and SIGTERM write one."""
    overwrite_output_dir: bool = False
    """Delete an earlier run in `output_dir`."""

    def __post_init__(self) -> None:
        check_steps(self.step)
        if self.resume and self.overwrite_output_dir:
            raise ValueError("--resume and --overwrite-output-dir contradict each other: use one")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be from 0 to {2**32 - 1} (2^32 - 1), got {self.seed}")
        self._check_trackers()
        self._check_reward_model()
        self._check_packing()
        check_at_least(self, 1, "log_interval", "save_total_limit", "eval_batches")
        check_at_least(self, 0, "eval_interval", "save_interval")

    def _check_trackers(self) -> None:
        """ValueError for what only a tracker that is not asked for would read."""
        named = self.project is not None or self.run_name is not None
        if named and not {"wandb", "trackio"} & set(self.report_to):
            raise ValueError("project and run_name are for --report-to wandb or trackio: add one")
        if self.tensorboard_path is not None and "tensorboard" not in self.report_to:
            raise ValueError("tensorboard_path needs --report-to tensorboard: add it")

    def _check_reward_model(self) -> None:
        """ValueError where step 2 trains what step 3 does not load."""
        if {2, 3} <= set(self.step) and not self.ppo.reward_model_weight:
            others = " ".join(str(step) for step in self.step if step != 2)
            raise ValueError(
                "ppo.reward_model_weight=0: step 2 would train a reward model that step 3 does not "
                f"use: leave it out with --step {others}, or give a weight above 0"
            )

    def _check_packing(self) -> None:
        """ValueError where a stage packs rows that a weighted blend draws anew for each epoch."""
        packed = {"sft": self.sft.packing, "reward": self.reward.packing}
        for stage, packing in packed.items():
            if packing and stage in self.stages and self.data.data_weights:
                raise ValueError(
                    f"{stage}.packing needs the same rows in every epoch, and data.data_weights "
                    "draws others for each: leave one of them out"
                )

    @property
    def stages(self) -> tuple[StageName, ...]:
        return tuple(STAGES[step] for step in self.step)


def check_steps(steps: Sequence[object]) -> None:
    """ValueError unless these steps can follow each other in one run."""
    got = " ".join(map(str, steps)) or "nothing"
    order: list[object] = list(STAGES)
    if not steps or not set(steps) <= set(order):
        raise ValueError(f"--step takes any of 1 2 3, or dpo, got {got}")
    if "dpo" in steps and {2, 3} & set(steps):
        raise ValueError(
            f"--step {got}: dpo takes the place of steps 2 and 3: use --step 1 dpo, or 1 2 3"
        )
    if list(steps) != sorted(set(steps), key=order.index):
        raise ValueError(f"--step must name each stage once and in order, got {got}")
