"""DeepSpeed-Chat's flags: what each one is called here, or why it is not needed, or not offered.

From `e2e_rlhf.py` and `training/step{1,2,3}_*/main.py`. Names that are equal on both sides are not
listed. Every name below stands in docs/flags.md, which a test checks.
"""

from dataclasses import dataclass
from typing import Literal

type Rule = Literal[
    "as_given",
    "rows_per_device",
    "micro_rows_per_device",
    "checkpointing",
    "tensorboard",
    "adapters",
]


@dataclass(frozen=True)
class Target:
    """The config field that a name sets, and how its value becomes the field's.

    `rows_per_device`: times the devices of the mesh. `micro_rows_per_device`: also times
    `gradient_accumulation_steps`, since DeepSpeed counts the rows of one accumulated part.
    `checkpointing`: a switch, as `full` or `none`. `tensorboard`: a switch, as that
    tracker or none.
    `adapters`: a rank, whose `alpha` becomes DeepSpeed-Chat's 1 unless it is given. `also` are
    further fields that get the same value.
    """

    path: str
    rule: Rule = "as_given"
    note: str = ""
    also: tuple[str, ...] = ()


def _adapters(names: str, path: str) -> dict[str, Target]:
    """The names of one model's adapters: `names` stands in front of theirs, `path` of ours."""
    return {
        f"{names}lora_dim": Target(f"{path}.dim", "adapters"),
        f"{names}lora_module_name": Target(f"{path}.modules"),
        f"{names}lora_learning_rate": Target(f"{path}.learning_rate"),
    }


RENAMED: dict[str, Target] = {
    "sft.model_name_or_path": Target("actor_model"),
    "reward.model_name_or_path": Target("reward_model"),
    "dpo.model_name_or_path": Target("actor_model"),
    "ppo.actor_model_name_or_path": Target("actor_model"),
    "ppo.critic_model_name_or_path": Target("reward_model"),
    "sft.per_device_train_batch_size": Target("sft.batch_size", "micro_rows_per_device"),
    "reward.per_device_train_batch_size": Target("reward.batch_size", "micro_rows_per_device"),
    "dpo.per_device_train_batch_size": Target("dpo.batch_size", "micro_rows_per_device"),
    "ppo.per_device_generation_batch_size": Target("ppo.batch_size", "rows_per_device"),
    "ppo.per_device_training_batch_size": Target("ppo.minibatch_size", "rows_per_device"),
    # Older scripts call these two, and the next, otherwise.
    "ppo.per_device_train_batch_size": Target("ppo.batch_size", "rows_per_device"),
    "ppo.per_device_mini_train_batch_size": Target("ppo.minibatch_size", "rows_per_device"),
    "ppo.generation_batch_numbers": Target("ppo.generation_batches"),
    "sft.gradient_checkpointing": Target("sft.remat", "checkpointing"),
    "reward.gradient_checkpointing": Target("reward.remat", "checkpointing"),
    "dpo.gradient_checkpointing": Target("dpo.remat", "checkpointing"),
    "ppo.actor_gradient_checkpointing": Target("ppo.remat", "checkpointing"),
    "ppo.critic_gradient_checkpointing": Target("ppo.remat", "checkpointing"),
    "ppo.learning_rate": Target(
        "ppo.actor_learning_rate",
        note="it is the actor's rate; the critic's is --ppo.critic-learning-rate",
    ),
    **_adapters("sft.", "sft.lora"),
    **_adapters("reward.", "reward.lora"),
    **_adapters("dpo.", "dpo.lora"),
    **_adapters("ppo.actor_", "ppo.actor_lora"),
    **_adapters("ppo.critic_", "ppo.critic_lora"),
    "sft.only_optimize_lora": Target("sft.lora.only"),
    "reward.only_optimize_lora": Target("reward.lora.only"),
    "dpo.only_optimize_lora": Target("dpo.lora.only"),
    "ppo.only_optimize_lora": Target("ppo.actor_lora.only", also=("ppo.critic_lora.only",)),
    "ppo.enable_mixed_precision_lora": Target("ppo.actor_lora.load_in_8bit"),
    "ppo.pin_parameters": Target("ppo.pin_rollout"),
    "ppo.enable_ema": Target("ppo.ema.enable"),
    "ppo.unsup_coef": Target("ppo.ptx_coef"),
    "ppo.unsupervised_dataset_name": Target("ppo.ptx_path"),
    "eval_iters": Target("eval_batches"),
    "enable_tensorboard": Target("report_to", "tensorboard"),
    "test_stop_step": Target(
        "ppo.max_steps", note="it ends step 3 after so many iterations, skipped ones included"
    ),
}

ONE_SWITCH = {"ppo.actor_gradient_checkpointing", "ppo.critic_gradient_checkpointing"}
"""Both may be given: here one field serves actor and critic."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "sft.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "reward.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "dpo.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "ppo.lr_scheduler_type": {"constant_with_warmup": "constant"},
}
"""Other spellings of values, by field."""

OPT_SIZES = ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b")

_SHARDED = "parameters, gradients and optimizer state are always fully sharded (ZeRO-3)"
_CACHE = "the KV cache lives inside one generation and is freed with it"
_DEEPSPEED = "DeepSpeed is not used"
_NO_DROPOUT = "dropout is never applied, but to adapters"

NOT_NEEDED: dict[str, str] = {
    "actor_zero_stage": _SHARDED,
    "reward_zero_stage": _SHARDED,
    "critic_zero_stage": _SHARDED,
    "zero_stage": _SHARDED,
    "enable_hybrid_engine": "the engine always trains and generates on the same devices",
    "release_inference_cache": _CACHE,
    "max_out_tokens": "the KV cache has room for --ppo.max-prompt-seq-len and "
    "--ppo.max-answer-seq-len tokens",
    "unpin_actor_parameters": "weights that are gathered for a generation are freed with it, "
    "unless --ppo.pin-rollout keeps them",
    "enable_cuda_graph": "XLA makes CUDA graphs of kernels by itself",
    "tp_gather_partition_size": "XLA schedules the gathers",
    "local_rank": "one process drives all devices of its node",
    "deepspeed": _DEEPSPEED,
    "num_padding_at_beginning": "row ends come from lengths, not from a search for the pad token",
    "compute_fp32_loss": "losses and log-probabilities are always float32",
    "align_overflow": "a step that is not finite is skipped for actor and critic together",
    "print_answers": "sample tables are in samples/ of the output directory",
    "print_answers_interval": "sample tables are in samples/ of the output directory",
    "print_loss": "losses are logged every --log-interval steps",
    "data_output_path": "tokenized rows are not cached on disk",
    "per_device_eval_batch_size": "evaluation uses the training batch size",
    "add_eot_token": "answers end in the tokenizer's EOS, by its id, in every step",
    "disable_dropout": _NO_DROPOUT,
    "disable_actor_dropout": _NO_DROPOUT,
    "disable_critic_dropout": _NO_DROPOUT,
    "enable_test_mode": "--test-stop-step ends step 3 by itself",
}
"""Accepted, with a printed note that gives this reason."""

_DROPOUT = (
    "dropout is never applied (adapters have --sft.lora.dropout and the like): PPO compares "
    "probabilities of one model, which dropout makes two"
)

REFUSED: dict[str, str] = {
    "dropout": _DROPOUT,
    "actor_dropout": _DROPOUT,
    "critic_dropout": _DROPOUT,
    "eot_token": "answers end in the EOS that the model's tokenizer names",
    "unsupervised_dataset_config_name": "it stands behind the name, "
    "--unsupervised-dataset-name=owner/name:config",
    "deepspeed_config": "DeepSpeed's JSON is not read, every setting has its own flag",
}
"""Refused for this reason, unless the value given turns it off."""

OFF_VALUES = {"0", "0.0", "false", "none"}
