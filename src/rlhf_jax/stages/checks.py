"""What a config asks for, checked before anything is written or compiled.

Stage 3 starts an hour after stage 1 on large models: what can be known now is said now.
"""

from pathlib import Path
from typing import Any

from meshes.layout import MeshShape
from rlhf_jax.data.tokenize import tokenize_pairs, tokenize_prompts, tokenize_sft
from rlhf_jax.hf.convert import check, plan
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.models.lora import LoRAConfig, select_modules
from rlhf_jax.models.params import param_specs, scalar_specs
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.ptx import read_ptx
from rlhf_jax.stages.reward_plan import (
    RewardPlan,
    check_prompt_rows,
    plan_rewards,
    score_statistics,
)
from rlhf_jax.stages.rows import Tokenize, length_limit, read_rows

TOKENIZE: dict[StageName, Tokenize[Any]] = {
    "sft": tokenize_sft,
    "reward": tokenize_pairs,
    "ppo": tokenize_prompts,
    "dpo": tokenize_pairs,
}


def check_batches(cfg: TrainConfig, shape: MeshShape) -> None:
    """ValueError where a batch of a stage that runs does not divide over the mesh."""
    rows = shape.replica * shape.fsdp
    sizes = {
        "--sft.batch-size": ("sft", cfg.sft.batch_size // cfg.sft.gradient_accumulation_steps),
        "--reward.batch-size": (
            "reward",
            cfg.reward.batch_size // cfg.reward.gradient_accumulation_steps,
        ),
        "--dpo.batch-size": ("dpo", cfg.dpo.batch_size // cfg.dpo.gradient_accumulation_steps),
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
    """ValueError or FileNotFoundError where weights, positions or tokenizers do not fit.

    `actor` is not looked at where step 2 runs alone.
    """
    if cfg.stages != ("reward",):
        check_weights(actor, scalar=False)
    if "sft" in cfg.stages:
        check_positions(actor, length_limit(cfg, "sft"))
        check_adapters(actor, cfg.sft.lora)
    if "dpo" in cfg.stages:
        check_positions(actor, length_limit(cfg, "dpo"))
        check_adapters(actor, cfg.dpo.lora)
    if not {"reward", "ppo"} & set(cfg.stages):
        return
    if "reward" in cfg.stages or cfg.ppo.reward_model_weight:
        reward = reward_origin(cfg, actor)
        check_weights(reward, scalar=True)
        if "reward" in cfg.stages:
            check_positions(reward, length_limit(cfg, "reward"))
            check_adapters(reward, cfg.reward.lora)
    if "ppo" in cfg.stages:
        check_ppo_models(cfg, actor, ppo_plan(cfg, actor))


def check_ppo_models(cfg: TrainConfig, actor: Pretrained, plan: RewardPlan) -> None:
    """ValueError where a model of step 3 is too short, or its scores have no known units."""
    answer = "--ppo.max-answer-seq-len", cfg.ppo.max_answer_seq_len
    for model in (actor, plan.critic, plan.reward):
        if model is not None:
            check_positions(model, length_limit(cfg, "ppo"), answer)
    check_adapters(actor, cfg.ppo.actor_lora)
    check_adapters(plan.critic, cfg.ppo.critic_lora)
    if "reward" not in cfg.stages:
        built_in = plan.reward is not None and plan.reward.name == QUICKSTART
        if built_in and cfg.ppo.standardize_score:
            raise ValueError(untrained_reward_model(cfg.output_dir))
        score_statistics(cfg.ppo, plan.reward)


def untrained_reward_model(output_dir: str) -> str:
    """What to do where step 3 runs without step 2 and no reward model was named."""
    is_there = (Path(output_dir) / "reward").is_dir()
    run = output_dir if is_there else "RUN"
    which = "and another --output-dir" if is_there else "of an earlier run"
    return (
        "step 3 needs a trained reward model, and step 2 is not in --step: give "
        f"--actor-model={run}/sft --reward-model={run}/reward {which}, or --step 1 2 3"
    )


def ppo_plan(cfg: TrainConfig, actor: Pretrained) -> RewardPlan:
    """The plan of step 3 as far as it is known now."""
    reward = reward_origin(cfg, actor) if cfg.ppo.reward_model_weight else None
    return plan_rewards(cfg.ppo, actor, reward)


def check_positions(model: Pretrained, *lengths: tuple[str, int]) -> None:
    """ValueError where lengths, each with its flag, together exceed the model's positions."""
    room, total = model.cfg.max_positions, sum(length for _, length in lengths)
    if total > room:
        asked = " and ".join(f"{flag}={length}" for flag, length in lengths)
        several = len(lengths) > 1
        raise ValueError(
            f"{asked} make{'' if several else 's'} {total} tokens, {model.name} has {room} "
            f"positions: lower {f'them to {room} together' if several else f'it to {room}'}"
        )


def check_adapters(model: Pretrained, lora: LoRAConfig) -> None:
    """ValueError where a pattern for adapters fits no module of the model."""
    if lora.dim:
        select_modules(model.cfg, lora.modules)


def check_weights(model: Pretrained, *, scalar: bool) -> None:
    """Compares the names and shapes in a model's files with its config; reads no data."""
    checkpoint = model.checkpoint()
    if checkpoint is None:
        return
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


def check_data(cfg: TrainConfig, actor: Pretrained) -> dict[StageName, str | None]:
    """ValueError or FileNotFoundError where a stage that runs has no rows to train on; else how
    the rows of each write a question (`trained_format`).

    They are read and tokenised once more when the stage starts: seconds, against a run lost at
    its last stage, and against the rows of all stages in memory all the time.
    """
    formats: dict[StageName, str | None] = {}
    for stage in cfg.stages:
        model = reward_origin(cfg, actor) if stage == "reward" else actor
        rows = read_rows(cfg, stage, model, TOKENIZE[stage])
        formats[stage] = rows.turn_format
        if stage == "ppo":
            both = [*rows.train, *rows.held_out]
            check_prompt_rows(ppo_plan(cfg, actor), actor, both, cfg.data.chat_format)
            if cfg.ppo.ptx_path is not None:
                read_ptx(cfg, actor)
    return formats
