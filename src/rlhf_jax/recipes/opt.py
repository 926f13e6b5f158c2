"""OPT on Dahoas/rm-static, and DeepSpeed-Chat's scripts for OPT, one function each.

The scripts are training_scripts/opt/<deployment>/run_<size>.sh of the three steps, with this
project's rules of training (`deepspeed_chat.py` has theirs). Their rows are those of one device
and one accumulated part; here they are multiplied out with the devices that each deployment
stands for. Step 3 takes its prompts from all data sets of steps 1 and 2; theirs from rm-static.
"""

from dataclasses import replace
from typing import Literal, TypedDict

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.engine.ema import EMAConfig
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import DPOConfig, RewardConfig, SFTConfig

Deployment = Literal["single_gpu", "single_node", "multi_node"]

DEVICES: dict[Deployment, int] = {"single_gpu": 1, "single_node": 8, "multi_node": 64}
"""What the sizes of batches assume. Any mesh over which a batch divides will do."""

RM_STATIC = "Dahoas/rm-static"
FOUR_DATA_SETS = (
    RM_STATIC,
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
)


def lora(dim: int = 128) -> LoRAConfig:
    """DeepSpeed-Chat's adapters: on every linear layer, scaled by 1 / dim, with their own rate."""
    return LoRAConfig(dim=dim, alpha=1.0, learning_rate=5e-4)


class Rows(TypedDict):
    """The fields that say how many rows an optimizer step sees, and in how many parts."""

    batch_size: int
    gradient_accumulation_steps: int


def rows(per_device: int, deployment: Deployment, parts: int = 1) -> Rows:
    """Rows of one optimizer step over all devices and accumulated parts."""
    return {
        "batch_size": per_device * DEVICES[deployment] * parts,
        "gradient_accumulation_steps": parts,
    }


def opt() -> TrainConfig:
    """OPT-1.3B on one data set, for any mesh; what a run takes that names a model and no recipe.

    python -m rlhf_jax.train --mesh=8x1 --actor-model=1.3b --reward-model=350m
    """
    scripts = opt_1_3b_single_node()
    return replace(
        scripts,
        output_dir="runs/opt",
        data=replace(scripts.data, data_path=(RM_STATIC,)),
        sft=replace(scripts.sft, remat="auto"),
        reward=replace(scripts.reward, remat="auto"),
        dpo=replace(scripts.dpo, remat="auto"),
        ppo=replace(scripts.ppo, remat="auto", ema=EMAConfig()),
    )


def opt_1_3b_single_gpu() -> TrainConfig:
    """OPT-1.3B with adapters on one device, on one data set.

    python -m rlhf_jax.train --deployment-type=single_gpu --actor-model=1.3b
    """
    base = opt_recipe(
        "1.3b",
        "single_gpu",
        SFTConfig(learning_rate=1e-3, lora=lora(), remat="none", **rows(16, "single_gpu", parts=8)),
        PPOConfig(actor_lora=lora(), **rows(16, "single_gpu", parts=2)),
    )
    return replace(base, data=replace(base.data, data_path=(RM_STATIC,)))


def opt_6_7b_single_gpu() -> TrainConfig:
    """OPT-6.7B with adapters on one device: run_6.7b_lora.sh.

    python -m rlhf_jax.train --deployment-type=single_gpu --actor-model=6.7b
    """
    return opt_recipe(
        "6.7b",
        "single_gpu",
        SFTConfig(
            learning_rate=1e-3,
            num_train_epochs=16,
            lora=lora(),
            **rows(8, "single_gpu", parts=16),
        ),
        PPOConfig(actor_learning_rate=5e-4, actor_lora=lora(), **rows(8, "single_gpu", parts=16)),
    )


def opt_1_3b_single_node() -> TrainConfig:
    """OPT-1.3B, all weights, on one node, with a moving average of the actor.

    python -m rlhf_jax.train --deployment-type=single_node --actor-model=1.3b
    """
    return opt_recipe(
        "1.3b",
        "single_node",
        SFTConfig(
            learning_rate=9.65e-6, num_train_epochs=16, remat="none", **rows(8, "single_node")
        ),
        PPOConfig(remat="none", ema=EMAConfig(enable=True), **rows(4, "single_node")),
    )


def opt_1_3b_lora_single_node() -> TrainConfig:
    """OPT-1.3B with adapters on one node: run_1.3b_lora.sh.

    python -m rlhf_jax.train --recipe=opt-1.3b-lora-single-node
    """
    return opt_recipe(
        "1.3b",
        "single_node",
        SFTConfig(
            learning_rate=1e-3,
            weight_decay=0.1,
            num_train_epochs=16,
            lora=replace(lora(), only=True),
            remat="none",
            **rows(8, "single_node"),
        ),
        PPOConfig(actor_lora=lora(), remat="none", **rows(4, "single_node")),
    )


def opt_6_7b_single_node() -> TrainConfig:
    """OPT-6.7B, all weights, on one node.

    python -m rlhf_jax.train --deployment-type=single_node --actor-model=6.7b
    """
    return opt_recipe(
        "6.7b",
        "single_node",
        SFTConfig(learning_rate=9.65e-6, num_train_epochs=16, **rows(6, "single_node")),
        PPOConfig(actor_weight_decay=0.1, critic_weight_decay=0.1, **rows(4, "single_node")),
    )


def opt_13b_single_node() -> TrainConfig:
    """OPT-13B with adapters on one node.

    python -m rlhf_jax.train --deployment-type=single_node --actor-model=13b
    """
    return opt_recipe(
        "13b",
        "single_node",
        SFTConfig(learning_rate=1e-4, num_train_epochs=16, lora=lora(), **rows(4, "single_node")),
        PPOConfig(actor_learning_rate=5e-4, actor_lora=lora(), **rows(16, "single_node")),
        inference_tp_size=2,
    )


def opt_30b_single_node() -> TrainConfig:
    """OPT-30B with adapters on one node: run_30b_lora.sh.

    python -m rlhf_jax.train --deployment-type=single_node --actor-model=30b
    """
    return opt_recipe(
        "30b",
        "single_node",
        SFTConfig(
            learning_rate=9.65e-6, num_train_epochs=16, lora=lora(), **rows(4, "single_node")
        ),
        PPOConfig(actor_learning_rate=5e-4, actor_lora=lora(), **rows(4, "single_node")),
    )


def opt_66b_multi_node() -> TrainConfig:
    """OPT-66B with adapters on 8 nodes of 8 devices.

    python -m rlhf_jax.train --deployment-type=multi_node --actor-model=66b

    `--mesh=8x8x1` keeps a copy of the model in each node and the gathers inside it; without it the
    model is sharded over all devices.
    """
    return opt_recipe(
        "66b",
        "multi_node",
        SFTConfig(
            learning_rate=1e-4,
            weight_decay=0.1,
            num_train_epochs=2,
            lora=lora(),
            **rows(4, "multi_node"),
        ),
        PPOConfig(
            actor_learning_rate=5e-4,
            actor_weight_decay=0.1,
            critic_weight_decay=0.1,
            actor_lora=lora(),
            **rows(4, "multi_node"),
        ),
        inference_tp_size=8,
    )


def opt_30b_multi_node() -> TrainConfig:
    """The settings of 66B: DeepSpeed-Chat has no script of 30B for several nodes."""
    return as_size(opt_66b_multi_node(), "30b")


def opt_175b_multi_node() -> TrainConfig:
    """The settings of 66B: DeepSpeed-Chat has no script of 175B, and the Hub has no weights of it
    (`--actor-model` takes a directory).
    """
    return as_size(opt_66b_multi_node(), "175b")


def as_size(config: TrainConfig, size: str) -> TrainConfig:
    """The settings of one size for another one."""
    return replace(config, actor_model=f"facebook/opt-{size}", output_dir=f"runs/opt-{size}")


def opt_recipe(
    size: str,
    deployment: Deployment,
    sft: SFTConfig,
    ppo: PPOConfig,
    inference_tp_size: int | None = None,
) -> TrainConfig:
    """What all scripts of a deployment share."""
    return TrainConfig(
        output_dir=f"runs/opt-{size}",
        actor_model=f"facebook/opt-{size}",
        reward_model="facebook/opt-350m",
        mesh="1x1" if deployment == "single_gpu" else None,
        inference_tp_size=inference_tp_size,
        dtype="bfloat16",
        data=DataConfig(data_path=FOUR_DATA_SETS, data_split="2,4,4"),
        sft=sft,
        reward=opt_350m_reward(deployment),
        ppo=ppo,
        dpo=DPOConfig(lora=sft.lora, remat=sft.remat, **pair_rows(deployment)),
    )


def pair_rows(deployment: Deployment) -> Rows:
    """Pairs of a step, as run_350m.sh has them for step 2 and for DPO."""
    if deployment == "single_gpu":
        return rows(16, deployment, parts=4)
    return rows(4 if deployment == "single_node" else 2, deployment)


def opt_350m_reward(deployment: Deployment) -> RewardConfig:
    """Step 2, run_350m.sh of each deployment."""
    return RewardConfig(learning_rate=5e-5, weight_decay=0.1, remat="none", **pair_rows(deployment))
