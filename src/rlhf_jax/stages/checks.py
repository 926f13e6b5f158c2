"""What a config asks for, checked before anything is written or compiled.

Stage 3 starts an hour after stage 1 on large models: what can be known now is said now.
"""

from pathlib import Path

from meshes.layout import MeshShape
from rlhf_jax.data.blend import load_stage_records
from rlhf_jax.hf.checkpoint import open_checkpoint
from rlhf_jax.hf.convert import check, plan
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.models.params import param_specs, scalar_specs
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.prompts import check_positions
from rlhf_jax.stages.reward import read_statistics
from rlhf_jax.stages.roles import check_same_tokens


def check_batches(cfg: TrainConfig, shape: MeshShape) -> None:
    """ValueError where a batch of a stage that runs does not divide over the mesh."""
    rows = shape.replica * shape.fsdp
    sizes = {
        "--sft.batch-size": ("sft", cfg.sft.batch_size // cfg.sft.gradient_accumulation_steps),
        "--reward.batch-size": (
            "reward",
            cfg.reward.batch_size // cfg.reward.gradient_accumulation_steps,
        ),
        "--ppo.batch-size": ("ppo", cfg.ppo.batch_size),
        "--ppo.minibatch-size": (
            "ppo",
            cfg.ppo.rows_per_step // cfg.ppo.gradient_accumulation_steps,
        ),
    }
    for flag, (stage, size) in sizes.items():
        if stage in cfg.stages and size % rows:
            raise ValueError(
                f"--mesh={shape} shards a batch over {rows} devices, {flag} gives parts of {size} "
                f"rows (after gradient accumulation): use a multiple of {rows}"
            )


def check_models(cfg: TrainConfig, actor: Pretrained) -> None:
    """ValueError or FileNotFoundError where weights, positions or tokenizers do not fit."""
    check_weights(actor, scalar=False)
    if cfg.stages == ("sft",):
        return
    reward = reward_origin(cfg, actor)
    check_weights(reward, scalar=True)
    if "ppo" not in cfg.stages:
        return
    for model in (actor, reward):
        check_positions(cfg.ppo.max_prompt_seq_len, cfg.ppo.max_answer_seq_len, model)
    check_same_tokens(actor, reward)
    if cfg.ppo.standardize_score and "reward" not in cfg.stages:
        read_statistics(reward)


def check_weights(model: Pretrained, *, scalar: bool) -> None:
    """Compares the names and shapes in a model's files with its config; reads no data."""
    if model.directory is None:
        return
    checkpoint = open_checkpoint(model.directory)
    specs = scalar_specs(model.cfg) if scalar else param_specs(model.cfg)
    head = "new" if scalar and not model.is_scalar else "load"
    check(plan(specs, model.cfg, checkpoint), model.cfg, checkpoint, head)


def reward_origin(cfg: TrainConfig, actor: Pretrained) -> Pretrained:
    """What the reward model of this run is, or is trained from."""
    if "reward" in cfg.stages:
        from_actor = cfg.reward.train_from == "actor"
        return find_pretrained(actor.name if from_actor else cfg.reward_model, scalar=True)
    trained = Path(cfg.output_dir) / "reward"
    name = str(trained) if cfg.resume and trained.exists() else cfg.reward_model
    return find_pretrained(name, scalar=True)


def check_data(cfg: TrainConfig) -> None:
    """ValueError or FileNotFoundError where a stage cannot read its rows.

    They are read once more when the stage starts: seconds, against a run lost at its last stage.
    """
    for stage in cfg.stages:
        load_stage_records(cfg.data, stage, seed=cfg.seed)
