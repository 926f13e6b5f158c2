"""Which rows an update phase sees, and the sizes that follow from a config."""

import functools
from collections import namedtuple
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.engine.ppo_step import UpdateSettings
from rlhf_jax.engine.state import create_state
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.objectives.adaptive import AdaptiveKL
from rlhf_jax.stages.ppo import Programs, describe_correction
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ppo_rows import Scored, count_updates, minibatches
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.roles import Cast
from tests.engine.drive import Driver
from tests.engine.test_ppo_step import SCORING, scored
from tests.models.cases import OPT


def rows_of(cfg: PPOConfig, step: int = 0, seed: int = 0) -> list[tuple[Any, list[int]]]:
    """(generated batch, its rows) of every optimizer step of an iteration."""
    valid_B = np.ones(cfg.batch_size, np.float32)
    names: Any = range(cfg.generation_batches)
    batches = [Scored(name, valid_B) for name in names]
    return [(b.experience, rows.tolist()) for b, rows in minibatches(cfg, batches, seed, step)]


CONFIGS = [
    PPOConfig(batch_size=8),
    PPOConfig(batch_size=8, minibatch_size=4, ppo_epochs=3),
    PPOConfig(batch_size=8, minibatch_size=2, generation_batches=3, ppo_epochs=2),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=range(3))
def test_every_epoch_sees_every_row_once_and_no_minibatch_mixes_batches(cfg: PPOConfig) -> None:
    steps = rows_of(cfg)
    assert len(steps) == cfg.updates_per_iteration
    per_epoch = len(steps) // cfg.ppo_epochs
    everything = {(batch, row) for batch in range(cfg.generation_batches) for row in range(8)}
    for epoch in range(cfg.ppo_epochs):
        seen = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        pairs = [(batch, row) for batch, rows in seen for row in rows]
        assert len(pairs) == len(everything)
        assert set(pairs) == everything


@pytest.mark.parametrize(
    ("fields", "threshold", "recomputes"),
    [
        ({}, None, False),
        ({"old_logprobs": "train"}, None, True),
        ({"rollout_weights": "int8"}, 2.0, True),
        ({"rollout_kv_cache": "fp8", "rollout_is_threshold": 5.0}, 5.0, True),
        ({"rollout_weights": "fp8", "rollout_is_threshold": 0.0}, None, False),
        ({"rollout_is_threshold": 3.0}, 3.0, True),
    ],
)
def test_rounded_rollouts_are_corrected_unless_told_otherwise(
    fields: dict[str, Any], threshold: float | None, recomputes: bool
) -> None:
    """With old log-probabilities of the training graph, and said in a line."""
    cfg = PPOConfig(**fields)
    assert (cfg.is_threshold, cfg.recomputes_logprobs) == (threshold, recomputes)
    said = describe_correction(cfg)
    assert (said is None) == (fields.keys() <= {"old_logprobs"})
    if said is not None:
        assert ("training graph's" in said) == (threshold is not None)
        assert ("fp8" in said) == ("fp8" in fields.values())


@pytest.mark.parametrize("size", [1, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_fillers_stand_behind_and_a_minibatch_of_them_alone_is_left_out(
    size: int, rows: int
) -> None:
    """So the steps of a run are known before it."""
    cfg = PPOConfig(batch_size=8, minibatch_size=rows, generation_batches=2, ppo_epochs=2)
    name: Any = "batch"
    full, part = (Scored(name, (np.arange(8) < m).astype(np.float32)) for m in (8, size))
    steps = list(minibatches(cfg, [full, part], 0, 0))
    assert len(steps) == count_updates(cfg, [8, size])
    filled = [int(batch.valid_B[rows].sum()) for batch, rows in steps if batch is part]
    want = [rows] * (size // rows) + [size % rows] * (size % rows > 0)
    assert sorted(filled) == sorted(2 * want)


def test_the_order_is_drawn_from_seed_step_and_epoch() -> None:
    cfg = PPOConfig(batch_size=32, minibatch_size=8, ppo_epochs=2)
    assert rows_of(cfg, step=3) == rows_of(cfg, step=3)
    assert rows_of(cfg, step=3) != rows_of(cfg, step=4)
    assert rows_of(cfg, seed=1) != rows_of(cfg, seed=2)
    first, second = rows_of(cfg)[:4], rows_of(cfg)[4:]
    assert first != second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8, "minibatch_size": 3}, "minibatch_size=3 must divide batch_size=8"),
        ({"batch_size": 8, "generation_batches": 2, "minibatch_size": 16}, "=16 must divide"),
        ({"batch_size": 8, "gradient_accumulation_steps": 3}, "=3 does not divide minibatch_size"),
        ({"batch_size": "32"}, "batch_size must be a whole number, got '32'"),
        ({"ppo_epochs": 0}, "ppo_epochs must be at least 1, got 0"),
        ({"clip_range": -0.1}, "clip_range must be at least 0"),
        (
            {"target_kl": 0.1, "actor_lora": LoRAConfig(dim=2, dropout=0.1)},
            "target_kl=0.1 with actor_lora.dropout=0.1: dropout alone",
        ),
        ({"rollout_is_threshold": 0.5}, "use at least 1 .2 is usual., or 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lr_scheduler_type": "constnat"},
            "lr_scheduler_type='constnat' is not known: .*'linear'",
        ),
        ({"optim": "adam"}, "optim='adam' is not known: use one of 'adamw', 'lion', 'adafactor'"),
        ({"frozen_dtype": "bf16"}, "frozen_dtype='bf16' is not known: use one of 'bfloat16', 'fl"),
        ({"remat": "ful"}, "remat='ful' is not known"),
        ({"batch_size": 4.0}, "batch_size must be a whole number, got 4.0"),
        ({"max_prompt_seq_len": None}, "max_prompt_seq_len must be a whole number, got None"),
        ({"packing": "no"}, "packing must be True or False, got 'no'"),
        ({"lam": "0.95"}, "lam must be a number, got '0.95'"),
        ({"kl_coef": float("nan")}, "kl_coef=nan"),
        ({"score_clip": float("nan")}, "score_clip=nan"),
        ({"missing_eos_penalty": float("nan")}, "missing_eos_penalty=nan"),
    ],
)
def test_what_a_setting_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    """Flags are of their types; a config made in Python need not be."""
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


def test_numbers_of_numpy_are_numbers_and_nan_is_none() -> None:
    given: dict[str, Any] = {"batch_size": np.int64(8), "packing": np.bool(True)}
    assert PPOConfig(**given).packing
    with pytest.raises(ValueError, match="clip_range must be at least 0, got nan"):
        PPOConfig(clip_range=float("nan"))


def test_settings_reach_what_reads_them() -> None:
    cfg = PPOConfig(
        kl_coef=0.3, adaptive_kl_target=4.0, adaptive_kl_horizon=50, missing_eos_penalty=1.5,
        min_p=0.1, repetition_penalty=1.2,
    )  # fmt: skip
    assert cfg.adaptive_kl == AdaptiveKL(4.0, 50)
    assert (cfg.reward_settings.kl_coef, cfg.reward_settings.missing_eos_penalty) == (0.3, 1.5)
    assert (cfg.sampling.min_p, cfg.sampling.repetition_penalty) == (0.1, 1.2)
    assert PPOConfig().adaptive_kl is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adaptive_kl_target": 4.0, "kl_coef": 0.0}, "multiplies kl_coef, which is 0"),
        ({"adaptive_kl_target": 0.0}, "the target must be above 0"),
        ({"ptx_coef": -1.0}, "ptx_coef must be at least 0, got -1.0"),
        ({"min_p": 2.0}, r"min_p must lie in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ],
)
def test_settings_that_do_nothing_or_harm_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


@functools.cache
def updated(target_kl: float | None) -> tuple[int, float]:
    """Steps that the actor took, and `val/stopped`, where the log-probabilities are off by 1."""
    driver = Driver(OPT)
    rate = optax.constant_schedule(1.0)  # a run logs how far it is
    optimizers = (optax.sgd(rate), optax.sgd(rate))
    cast = Cast(driver.place, driver.place, None, optimizers, ({}, {}))
    plan = RewardPlan((), None, False, find_pretrained("quickstart"))
    cfg = PPOConfig(target_kl=target_kl, temperature=SCORING.temperature, remat="none")
    programs = Programs.create(cfg, cast, plan)
    experience, _ = scored(SCORING)
    moved = replace(experience, logprobs_BR=experience.logprobs_BR - 1)
    with jax.set_mesh(driver.engine.mesh):
        actor, critic = (
            create_state(model, optimizer)
            for model, optimizer in zip(
                (driver.actor(1), driver.scalar(3)), optimizers, strict=True
            )
        )
        actor, _, stopped, metrics = programs.update(
            actor, critic, moved, np.arange(8), jnp.bool_(False), None,
            frozen=(None, None), key=None,
        )  # fmt: skip
    assert bool(stopped) == bool(metrics["val/stopped"])
    return int(actor.step), float(metrics["val/stopped"])


@pytest.mark.parametrize(("target_kl", "expected"), [(0.4, (0, 1)), (0.6, (1, 0)), (None, (1, 0))])
def test_the_configs_target_stops_the_update(target_kl, expected) -> None:
    """The KL to the rollout is estimated as half the squared difference, 0.5."""
    assert updated(target_kl) == expected


def test_each_setting_of_the_update_is_read_from_its_own_field(monkeypatch) -> None:
    seen = []

    def record(*args: Any, settings: UpdateSettings, **static: Any) -> Any:
        seen.append(settings)
        return jnp.zeros(()), {}

    monkeypatch.setattr("rlhf_jax.stages.ppo.ppo_update", record)
    place: Any = None
    optimizer = optax.sgd(optax.constant_schedule(1.0))
    cast = Cast(place, place, None, (optimizer, optimizer), ({}, {}))
    changes: dict[str, Any] = {
        "temperature": 0.9, "clip_range": 0.11, "value_clip_range": 0.12, "value_coef": 0.13,
        "entropy_coef": 0.14, "target_kl": 0.15, "ptx_coef": 0.16, "remat": "dots",
    }  # fmt: skip
    cfg = PPOConfig(**changes, gradient_accumulation_steps=2, ptx_path="text")
    plan = RewardPlan((), None, False, find_pretrained("quickstart"))
    state: Any = namedtuple("State", "opt_state")(optimizer.init(jnp.zeros(())))
    Programs.create(cfg, cast, plan).update(state, state)
    assert seen == [UpdateSettings(**changes, num_parts=2)]
