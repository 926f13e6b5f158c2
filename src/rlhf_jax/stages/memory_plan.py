"""What each stage needs in device memory, said before it compiles; what cannot fit is refused."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.attention.pallas import LARGEST_HEAD_SIZE
from meshes.layout import MeshShape, abstract_mesh, default_inference_tp
from rlhf_jax.data.placing import longest_sequence
from rlhf_jax.engine.memory import FLOAT32, ModelMemory, Rows
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.stages.checks import ppo_plan, reward_origin
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.supervised_config import SupervisedConfig

GIB = 2**30
TOLERANCE = 0.15
"""By how much the formulas may miss what programs hold beside their arguments."""
MAX_DEVICES = 1024


@dataclass(frozen=True)
class Models:
    """The sizes of the models of a run; critic and reward are None where step 3 has none."""

    actor: ModelConfig
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None
    reward_is_critic: bool = True


def models_of(cfg: TrainConfig, stage: StageName, actor: Pretrained) -> Models:
    """The models of a stage, as far as they are known before it."""
    if stage == "reward":
        model = reward_origin(cfg, actor).cfg
        return Models(model, model)
    if stage != "ppo":
        return Models(actor.cfg)
    plan = ppo_plan(cfg, actor)
    reward = plan.reward and plan.reward.cfg
    return Models(actor.cfg, plan.critic.cfg, reward, plan.reward is plan.critic)


@dataclass(frozen=True)
class Place:
    """A mesh, and what kind of devices it has."""

    shape: MeshShape
    inference_tp: int | None = None
    platform: str = "gpu"


@dataclass(frozen=True)
class Plan:
    """Bytes on one device: what a stage holds all the time, by owner, and what each of its
    programs holds beside it.
    """

    stage: StageName
    held: dict[str, dict[str, int]]
    programs: dict[str, int]

    @property
    def resident(self) -> int:
        return sum(sum(parts.values()) for parts in self.held.values())

    @property
    def largest(self) -> str:
        """The program that needs most."""
        return max(self.programs, key=lambda name: self.programs[name])

    @property
    def peak(self) -> int:
        return self.resident + self.programs[self.largest]

    @property
    def least(self) -> int:
        """The peak where the formulas are too high by as much as they may be."""
        return self.resident + int(self.programs[self.largest] * (1 - TOLERANCE))

    def table(self, limit: int | None) -> str:
        """A line for each owner and one for the programs, in GiB."""
        lines = []
        for owner, parts in self.held.items():
            each = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
            lines.append(f"  {owner:<10}{each or 'nothing of its own'}")
        each = ", ".join(f"{name} {gib(size)}" for name, size in self.programs.items())
        lines.append(f"  {'programs':<10}{each}")
        there = "" if limit is None else f" of {gib(limit)}"
        most = f"about {gib(self.peak)} GiB{there} a device, most in {self.largest}"
        return "\n".join([f"{self.stage}: memory {most}; in GiB:", *lines])


def gib(size: int) -> str:
    """Three digits or so."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else f"{value:.4f}"


def plan_stage(cfg: TrainConfig, stage: StageName, models: Models, place: Place) -> Plan:
    """What a stage needs with rows as long as its settings allow."""
    if stage == "ppo":
        return plan_ppo(cfg, models, place)
    settings = {"sft": cfg.sft, "reward": cfg.reward, "dpo": cfg.dpo}[stage]
    scalar = stage == "reward"
    model = models.critic if scalar and models.critic is not None else models.actor
    trained = memory_of(cfg, model, place, settings.lora, scalar=scalar)
    length = min(settings.max_seq_len, model.max_positions)
    count = settings.batch_size * (1 if stage == "sft" else 2)
    rows = Rows(count, length, 0 if scalar else length - 1)
    held = {"model": state(trained, settings)}
    programs = {"update": update_bytes(trained, rows, settings), "evaluate": trained.scoring(rows)}
    if settings.offload:
        parts = settings.gradient_accumulation_steps
        programs["apply"] = trained.held_gradients(parts) + piece_bytes(trained, settings)
    if stage == "dpo":
        dpo = cfg.dpo
        reference = frozen(trained, dpo.frozen_dtype, dpo.offload_reference_model)
        held["reference"] = {"weights": reference}
        programs["reference"] = trained.scoring(rows)
        if dpo.num_eval_prompts:
            part = dpo.batch_size // dpo.gradient_accumulation_steps
            programs["generate"] = trained.generating(Rows(part, length, length // 2))
    return Plan(stage, held, programs)


def plan_ppo(cfg: TrainConfig, models: Models, place: Place) -> Plan:
    """Step 3: the state of actor and critic, the frozen models, and the three programs."""
    ppo = cfg.ppo
    assert models.critic is not None, "step 3 has a critic"
    actor = memory_of(cfg, models.actor, place, ppo.actor_lora)
    critic = memory_of(cfg, models.critic, place, ppo.critic_lora, scalar=True)
    answer = ppo.max_answer_seq_len
    prompt = min(ppo.max_prompt_seq_len, models.actor.max_positions - answer)
    rows = Rows(ppo.batch_size, prompt + answer, answer)
    held = {"actor": state(actor, ppo), "critic": state(critic, ppo)}
    held["reference"] = {"weights": frozen(actor, ppo.frozen_dtype, ppo.offload_reference_model)}
    if models.reward is not None:
        own = memory_of(cfg, models.reward, place, None, scalar=True)
        base = critic if models.reward_is_critic else own
        held["reward"] = {"weights": frozen(base, ppo.frozen_dtype, ppo.offload_reward_model)}
    if ppo.ema.enable:
        held["average"] = {"weights": 0 if ppo.ema.offload else actor.gradients()}
    parts = ppo.gradient_accumulation_steps
    scored = in_sequences(rows, ppo, actor)
    part = in_sequences(replace(rows, rows=ppo.rows_per_step), ppo, actor, parts)
    update = actor.training(part, ppo.remat, parts)
    if ppo.ptx_coef:
        text = replace(part, counted=part.length - 1, sequence=None)
        both = actor.held_gradients(parts) + actor.training(text, ppo.remat, parts)
        update = max(update, both)
    update = max(update, actor.held_gradients(parts) + critic.training(part, ppo.remat, parts))
    pinned = actor.pinned(ppo.rollout_weights, merged=ppo.merge_lora) if ppo.pin_rollout else 0
    programs = {
        "generate": actor.generating(
            rows,
            pinned=ppo.pin_rollout,
            merged=ppo.merge_lora,
            slots=ppo.rollout_slots,
            weights=ppo.rollout_weights,
            kv_cache=ppo.rollout_kv_cache,
        ),
        "score": pinned + max(actor.scoring(scored), critic.scoring(scored)),
        "update": update,
    }
    if ppo.offload:
        both = actor.held_gradients(parts) + critic.held_gradients(parts)
        programs["apply"] = both + max(piece_bytes(actor, ppo), piece_bytes(critic, ppo))
    return Plan("ppo", held, programs)


def in_sequences(rows: Rows, ppo: PPOConfig, actor: ModelMemory, num_parts: int = 1) -> Rows:
    """Rows as they are planned where `packing` lets them share sequences: as many tokens as
    without, of which a sequence may hold more.
    """
    if not ppo.packing:
        return rows
    groups = actor.compute.batch_size_divisor * num_parts
    return replace(rows, sequence=longest_sequence(rows.rows // groups, rows.length))


def memory_of(
    cfg: TrainConfig,
    model: ModelConfig,
    place: Place,
    lora: LoRAConfig | None,
    *,
    scalar: bool = False,
) -> ModelMemory:
    """A model of this run on this mesh."""
    chosen = place.inference_tp or default_inference_tp(
        place.shape, model.num_heads, model.num_kv_heads
    )
    fused = place.platform == "gpu" and model.head_size <= LARGEST_HEAD_SIZE
    mesh = abstract_mesh(place.shape, chosen)
    return ModelMemory(model, mesh, jnp.dtype(cfg.dtype), lora, scalar, fused)


def state(model: ModelMemory, cfg: PPOConfig | SupervisedConfig) -> dict[str, int]:
    """What a model that trains has on a device."""
    if cfg.offload:
        return {"weights": model.weights()}
    moments = model.moments(cfg.optim, cfg.moments_dtype)
    return {"weights": model.weights(), "masters": model.masters(), "moments": moments}


def piece_bytes(model: ModelMemory, cfg: PPOConfig | SupervisedConfig) -> int:
    """One piece in an offloaded update: masters and moments as they come and as they go, and its
    gradients in float32.
    """
    share = model.moments(cfg.optim, cfg.moments_dtype) / max(model.gradients(), 1)
    masters = 0 if model.itemsize == FLOAT32 else 1
    return int(model.largest_piece() * (2 * (masters + share) + 1))


def frozen(model: ModelMemory, dtype: str | None, offload: bool) -> int:
    """A frozen copy of what a model starts from, as `stages.trainable.load_frozen` makes it."""
    wanted = model.itemsize if dtype is None else jnp.dtype(dtype).itemsize
    lora = model.lora
    if lora is not None and lora.load_in_8bit:
        return model.copied()
    if lora is not None and lora.dim and wanted == model.itemsize and (lora.only or not offload):
        return model.copied()
    return 0 if offload else model.plain_weights() * wanted // model.itemsize


def update_bytes(model: ModelMemory, rows: Rows, cfg: SupervisedConfig) -> int:
    """The train step of steps 1, 2 and dpo."""
    return model.training(rows, cfg.remat, cfg.gradient_accumulation_steps)


def device_limit() -> int | None:
    """Bytes that every device may use; None where devices do not say (a CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    limits = [each["bytes_limit"] for each in stats if each and "bytes_limit" in each]
    return min(limits) if len(limits) == len(stats) else None


def check_memory(
    cfg: TrainConfig, stage: StageName, models: Models, place: Place, limit: int | None
) -> Plan:
    """The plan of a stage.

    Raises:
        ValueError: it needs more than `limit` even where the formulas are too high; says which
            settings would do.
    """
    found = plan_stage(cfg, stage, models, place)
    if limit is None or found.least <= limit:
        return found
    ways = [way for way in (fitting(cfg, stage, models, place, limit),) if way]
    mesh = fitting_mesh(cfg, stage, models, place, limit)
    ways += [mesh] if mesh else []
    advice = f"use {' or '.join(ways)}" if ways else "no setting or mesh makes it fit"
    raise ValueError(
        f"{stage} needs about {gib(found.peak)} GiB on each device, most in {found.largest}, and "
        f"{gib(limit)} are there: {advice}"
    )


def fitting(
    cfg: TrainConfig, stage: StageName, models: Models, place: Place, limit: int
) -> str | None:
    """The first settings that fit this mesh, as flags."""
    for flags, changed in changes(cfg, stage, place):
        if plan_least(changed, stage, models, place).peak <= limit:
            return " ".join(flags)
    return None


def plan_least(cfg: TrainConfig, stage: StageName, models: Models, place: Place) -> Plan:
    """The plan with the fewest rollout slots: a run takes as few as it has to."""
    if stage == "ppo":
        actor = memory_of(cfg, models.actor, place, cfg.ppo.actor_lora)
        fewest = actor.rollout.batch_size_divisor
        cfg = replace(cfg, ppo=replace(cfg.ppo, rollout_slots=fewest))
    return plan_stage(cfg, stage, models, place)


def fitting_mesh(
    cfg: TrainConfig, stage: StageName, models: Models, place: Place, limit: int
) -> str | None:
    """The smallest mesh of more devices that fits the settings as they are."""
    fsdp = 2 * place.shape.fsdp
    while fsdp * place.shape.tensor * place.shape.replica <= MAX_DEVICES:
        shape = replace(place.shape, fsdp=fsdp)
        larger = replace(place, shape=shape, inference_tp=cfg.inference_tp_size)
        if rows_of_a_part(cfg, stage) % (shape.replica * fsdp):
            return None
        slots = (cfg.ppo.rollout_slots if stage == "ppo" else None) or 0
        shares = memory_of(cfg, models.actor, larger, None).rollout.batch_size_divisor
        if slots % shares == 0 and plan_least(cfg, stage, models, larger).peak <= limit:
            return f"--mesh={shape}"
        fsdp *= 2
    return None


def rows_of_a_part(cfg: TrainConfig, stage: StageName) -> int:
    """Rows of one micro-batch, over all devices."""
    settings = stage_settings(cfg, stage)
    rows = cfg.ppo.rows_per_step if stage == "ppo" else settings.batch_size
    return rows // settings.gradient_accumulation_steps


def stage_settings(cfg: TrainConfig, stage: StageName) -> Any:
    """The part of the config that is a stage's."""
    return {"sft": cfg.sft, "reward": cfg.reward, "ppo": cfg.ppo, "dpo": cfg.dpo}[stage]


def changes(
    cfg: TrainConfig, stage: StageName, place: Place
) -> Iterator[tuple[list[str], TrainConfig]]:
    """Settings that need less memory, the mildest first: each adds to those before it."""
    settings = stage_settings(cfg, stage)
    least = place.shape.replica * place.shape.fsdp
    before, rows = settings.gradient_accumulation_steps, rows_of_a_part(cfg, stage)
    counts = [before * n for n in range(2, rows + 1) if rows % n == 0 and (rows // n) % least == 0]

    def with_(flags: dict[str, Any], values: dict[str, Any]) -> tuple[list[str], TrainConfig]:
        shown = [
            f"--{stage}.{name}" if value is True else f"--{stage}.{name}={value}"
            for name, value in flags.items()
        ]
        return shown, replace(cfg, **{stage: replace(settings, **values)})

    flags: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for more_flags, more_values in steps_down(settings, stage):
        flags, values = flags | more_flags, values | more_values
        if flags:
            yield with_(flags, values)
        for count in counts:
            parts = {"gradient_accumulation_steps": count}
            yield with_(flags | {"gradient-accumulation-steps": count}, values | parts)


def steps_down(settings: Any, stage: StageName) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What can be given up, as flags and as fields."""
    yield {}, {}
    if stage == "ppo" and settings.pin_rollout:
        yield {"no-pin-rollout": True}, {"pin_rollout": False}
    if settings.remat != "full":
        yield {"remat": "full"}, {"remat": "full"}
    offload = {"ppo": ["reference", "reward"], "dpo": ["reference"]}.get(stage, [])
    names = [f"offload_{name}_model" for name in offload]
    if stage == "ppo" and not settings.reward_model_weight:
        names.remove("offload_reward_model")
    if any(not getattr(settings, name) for name in names):
        yield {name.replace("_", "-"): True for name in names}, dict.fromkeys(names, True)
    adapters = "actor_lora" if stage == "ppo" else "lora"
    lora, flag = getattr(settings, adapters), adapters.replace("_", "-")
    if not (lora.dim and lora.only):
        if settings.optim != "adafactor" and settings.moments_dtype == "float32":
            yield {"moments-dtype": "bfloat16"}, {"moments_dtype": "bfloat16"}
        if not settings.offload:
            yield {"offload": True}, {"offload": True}
        lora = replace(lora, dim=lora.dim or 16, only=True)
        yield {f"{flag}.dim": lora.dim, f"{flag}.only": True}, {adapters: lora}
    if not lora.load_in_8bit:
        small = replace(lora, load_in_8bit=True)
        yield {f"{flag}.load-in-8bit": True}, {adapters: small}
