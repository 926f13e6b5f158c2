"""All stages of a run, in order."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import jax

from meshes.layout import MeshShape, check_inference_tp
from meshes.multihost import COORDINATOR, num_processes, on_first_process, start_devices
from rlhf_jax.data.turn_format import BY_TEMPLATE
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.hf.tokenizer import with_turn_format
from rlhf_jax.runtime.compilation import (
    exclude_nondeterministic_operations,
    keep_compiled_programs,
)
from rlhf_jax.runtime.log import say, silence
from rlhf_jax.runtime.report.settings import Baseline, written
from rlhf_jax.runtime.trackers import check_installed
from rlhf_jax.stages.checks import check_batches, check_data, check_models
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.dpo import run_dpo
from rlhf_jax.stages.fit_remat import fit_remat
from rlhf_jax.stages.inference_tp import choose_inference_tp
from rlhf_jax.stages.memory_plan import Models, Place, Plan, check_memory, device_limit, models_of
from rlhf_jax.stages.ppo import run_ppo
from rlhf_jax.stages.reward import run_reward
from rlhf_jax.stages.rollout_slots import common_limit, fit_slots
from rlhf_jax.stages.run import Run, flatten, prepared_directory
from rlhf_jax.stages.sft import run_sft
from rlhf_jax.stages.summary import print_summary


def run_pipeline(cfg: TrainConfig, config_yaml: str, baseline: Baseline | None = None) -> None:
    """Runs the stages of `cfg.step`; each reads what the one before left in `output_dir`.

    `config_yaml` is the resolved config as text, which is saved first; what differs from `baseline`
    is printed, and shown in the report.

    Raises:
        ValueError, FileNotFoundError: the config asks for what is not there or does not fit.
    """
    started = time.perf_counter()
    keep_compiled_programs()
    if cfg.deterministic:
        exclude_nondeterministic_operations()
    say_who_waits()
    shape = start_devices(cfg.mesh, cpu_devices=min(os.cpu_count() or 1, 2))
    if jax.process_index() != 0:
        silence()
    with spoken_logs(), ExitStack() as held:
        say(settings_line(cfg, baseline))
        if cfg.inference_tp_size is not None:
            check_inference_tp(shape, cfg.inference_tp_size)
        actor = main_model(cfg)
        check_installed(cfg.report_to)
        check_batches(cfg, shape)
        check_models(cfg, actor)
        formats = check_data(cfg, actor)
        platform = jax.default_backend()
        rolled_out = models_of(cfg, "ppo", actor) if "ppo" in cfg.stages else Models(actor.cfg)
        inference_tp = choose_inference_tp(cfg, rolled_out, shape, platform, device_limit())
        place = Place(shape, inference_tp, platform)
        asked = cfg
        for stage in cfg.stages:
            cfg = fit_remat(cfg, stage, models_of(cfg, stage, actor), place, device_limit())
        if "ppo" in cfg.stages:
            cfg = fit_slots(cfg, models_of(cfg, "ppo", actor), place, device_limit())
        plans = memory_plans(cfg, place, actor)
        on_first_process(lambda: held.enter_context(prepared_directory(asked, config_yaml)))
        describe(shape, inference_tp, actor)
        run = Run(cfg, shape, inference_tp, baseline)
        with run.signals, run.metrics, run.report:
            for stage in cfg.stages:
                run_stage(run, stage, actor, plans[stage], formats[stage])
        print_summary(run.directory, time.perf_counter() - started)


def settings_line(cfg: TrainConfig, baseline: Baseline | None) -> str:
    """Where all settings are, and which are not those of `baseline`."""
    where = f"{cfg.output_dir}/config.yaml"
    if baseline is None:
        return f"settings: {where}"
    usual, mine = baseline.settings, flatten(cfg)
    changed = [
        f"{name}={written(value)}"
        for name, value in mine.items()
        if name in usual and written(value) != written(usual[name])
    ]
    but = f", but {', '.join(changed)}" if changed else ""
    return f"settings: {where}; as in {baseline.name}{but}"


def say_who_waits() -> None:
    """Several processes wait for each other before anything else, minutes where one is missing."""
    count = num_processes()
    if count > 1:
        number, place = os.environ["JAX_PROCESS_ID"], os.environ[COORDINATOR]
        say(f"process {number} of {count} (counted from 0) waits for the others at {place}")


def memory_plans(cfg: TrainConfig, place: Place, actor: Pretrained) -> dict[StageName, Plan]:
    """What each stage needs on a device; ValueError where one cannot fit."""
    limit = common_limit(device_limit())
    return {
        stage: check_memory(cfg, stage, models_of(cfg, stage, actor), place, limit)
        for stage in cfg.stages
    }


def run_stage(
    run: Run, stage: StageName, actor: Pretrained, plan: Plan, turn_format: str | None
) -> None:
    """Runs one stage, unless a resumed run has done it. What it leaves notes how it was asked."""
    cfg = run.cfg
    if cfg.resume and run.is_done(stage):
        say(f"{stage}: done already")
        return
    say(plan.table(device_limit()))
    began = time.perf_counter()
    run.timer.take()

    def asked(model: Pretrained) -> Pretrained:
        return asked_as(model, turn_format)

    if stage == "sft":
        run_sft(run, asked(actor))
    elif stage == "reward":
        run_reward(run, asked(reward_base(run)))
    elif stage == "dpo":
        run_dpo(run, asked(trained(run, "sft", cfg.actor_model)))
    else:
        policy = trained(run, "sft", cfg.actor_model)
        alone = cfg.ppo.reward_model_weight == 0
        reward = None if alone else trained(run, "reward", cfg.reward_model, scalar=True)
        run_ppo(run, asked(policy), reward)
    say(f"{stage}: {time.perf_counter() - began:.0f} s")


def asked_as(model: Pretrained, turn_format: str | None) -> Pretrained:
    """The model with a note of how training asks it; the one that it has stays where no prompts
    say how.
    """
    if turn_format is None:
        return model
    noted = None if turn_format == BY_TEMPLATE else turn_format
    return replace(model, tokenizer=with_turn_format(model.tokenizer, noted))


class _Say(logging.Handler):
    """Prints what the lower layers log, each line once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            say(line)


@contextmanager
def spoken_logs() -> Iterator[None]:
    """Prints what the layers below log, such as what had to be replicated."""
    loggers = [logging.getLogger(name) for name in ("meshes", "kernels_pallas", "rlhf_jax")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    handler = _Say()
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False  # a handler at the root, as absl installs one, would repeat them
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.removeHandler(handler)
            logger.propagate = propagate


def describe(shape: MeshShape, inference_tp: int, actor: Pretrained) -> None:
    """Says what runs where."""
    device = jax.devices()[0]
    cores = os.cpu_count() or 1
    cpu = "simulated CPU device" if shape.num_devices == 1 else "simulated CPU devices"
    cpu += f" on {cores} cores" if shape.num_devices > cores else ""
    kind = cpu if device.platform == "cpu" else device.device_kind
    cfg = actor.cfg
    say(
        f"mesh {shape}: {shape.num_devices} {kind}; decoding {inference_tp}-way tensor parallel; "
        f"{actor.name}: {cfg.num_params() / 1e6:.2f}M parameters, {cfg.num_layers} layers, "
        f"width {cfg.width}"
    )


def trained(run: Run, name: str, fallback: str, *, scalar: bool = False) -> Pretrained:
    """What an earlier stage left in the output directory, or the model that was named."""
    directory = run.export_dir(name)
    return find_pretrained(str(directory) if directory.exists() else fallback, scalar=scalar)


def main_model(cfg: TrainConfig) -> Pretrained:
    """The actor; the model that step 2 starts from where a run needs no actor."""
    if cfg.stages == ("reward",) and cfg.reward.train_from == "reward_model":
        return find_pretrained(cfg.reward_model, scalar=True)
    return find_pretrained(cfg.actor_model)


def reward_base(run: Run) -> Pretrained:
    """The model that the reward model starts from."""
    if run.cfg.reward.train_from == "actor":
        return trained(run, "sft", run.cfg.actor_model, scalar=True)
    return find_pretrained(run.cfg.reward_model, scalar=True)
