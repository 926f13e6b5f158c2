"""DeepSpeed-Chat's flags: what each one is called here, or why it is not needed, or not there yet.

From `e2e_rlhf.py` and `training/step{1,2,3}_*/main.py`. Names that are equal on both sides are not
listed. Every name below stands in docs/flags.md, which a test checks.
"""

from dataclasses import dataclass
from typing import Literal

type Rule = Literal["as_given", "rows_per_device", "micro_rows_per_device", "checkpointing"]


@dataclass(frozen=True)
class Target:
    """The config field that a name sets, and how its value becomes the field's.

    `rows_per_device`: times the devices of the mesh. `micro_rows_per_device`: also times
    `gradient_accumulation_steps`, since DeepSpeed counts the rows of one accumulated part.
    `checkpointing`: a switch, as `full` or `none`.
    """

    path: str
    rule: Rule = "as_given"
    note: str = ""


RENAMED: dict[str, Target] = {
    "sft.model_name_or_path": Target("actor_model"),
    "reward.model_name_or_path": Target("reward_model"),
    "ppo.actor_model_name_or_path": Target("actor_model"),
    "ppo.critic_model_name_or_path": Target("reward_model"),
    "sft.per_device_train_batch_size": Target("sft.batch_size", "micro_rows_per_device"),
    "reward.per_device_train_batch_size": Target("reward.batch_size", "micro_rows_per_device"),
    "ppo.per_device_generation_batch_size": Target("ppo.batch_size", "rows_per_device"),
    "ppo.per_device_training_batch_size": Target("ppo.minibatch_size", "rows_per_device"),
    "sft.gradient_checkpointing": Target("sft.remat", "checkpointing"),
    "reward.gradient_checkpointing": Target("reward.remat", "checkpointing"),
    "ppo.actor_gradient_checkpointing": Target("ppo.remat", "checkpointing"),
    "ppo.critic_gradient_checkpointing": Target("ppo.remat", "checkpointing"),
    "ppo.learning_rate": Target(
        "ppo.actor_learning_rate",
        note="it is the actor's rate; the critic's is --ppo.critic-learning-rate",
    ),
    "eval_iters": Target("eval_batches"),
}

ONE_SWITCH = {"ppo.actor_gradient_checkpointing", "ppo.critic_gradient_checkpointing"}
"""Both may be given: here one field serves actor and critic."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "sft.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "reward.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "ppo.lr_scheduler_type": {"constant_with_warmup": "constant"},
}
"""Other spellings of values, by field."""

OPT_SIZES = ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")

_SHARDED = "parameters, gradients and optimizer state are always fully sharded (ZeRO-3)"
_CACHE = "the KV cache lives inside one generation and is freed with it"
_DEEPSPEED = "DeepSpeed is not used"

NOT_NEEDED: dict[str, str] = {
    "actor_zero_stage": _SHARDED,
    "reward_zero_stage": _SHARDED,
    "critic_zero_stage": _SHARDED,
    "zero_stage": _SHARDED,
    "enable_hybrid_engine": "the engine always trains and generates on the same buffers",
    "release_inference_cache": _CACHE,
    "unpin_actor_parameters": "nothing is pinned without --ppo.pin-rollout",
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
}
"""Accepted, with a printed note that gives this reason."""

NOT_YET: dict[str, str] = {
    "enable_ema": "the moving average of the actor",
    "unsup_coef": "the pretraining mixture (PTX)",
    "unsupervised_dataset_name": "the pretraining mixture (PTX)",
    "unsupervised_dataset_config_name": "the pretraining mixture (PTX)",
    "lora_dim": "LoRA",
    "lora_module_name": "LoRA",
    "lora_learning_rate": "LoRA",
    "only_optimize_lora": "LoRA",
    "actor_lora_dim": "LoRA",
    "actor_lora_module_name": "LoRA",
    "actor_lora_learning_rate": "LoRA",
    "critic_lora_dim": "LoRA",
    "critic_lora_module_name": "LoRA",
    "critic_lora_learning_rate": "LoRA",
    "enable_mixed_precision_lora": "quantized base weights (MixZ++)",
    "offload": "offloading to host memory",
    "offload_reference_model": "offloading to host memory",
    "offload_reward_model": "offloading to host memory",
    "dropout": "dropout",
    "actor_dropout": "dropout",
    "critic_dropout": "dropout",
    "enable_tensorboard": "TensorBoard (metrics.jsonl holds every metric)",
    "tensorboard_path": "TensorBoard (metrics.jsonl holds every metric)",
    "add_eot_token": "an added end-of-text token",
    "eot_token": "an added end-of-text token",
    "beta": "DPO",
    "label_smoothing": "DPO",
    "deepspeed_config": "reading a DeepSpeed configuration (every setting has its own flag)",
    "enable_test_mode": "the test mode (--max-steps=N stops a stage early)",
    "test_stop_step": "the test mode (--max-steps=N stops a stage early)",
}
"""Refused as not implemented, unless the value given turns it off."""

OFF_VALUES = {"0", "0.0", "false", "none"}
