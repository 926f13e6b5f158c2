"""All stages of a run, in order."""

import os
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshes.layout import (
    MeshShape,
    check_device_count,
    check_inference_tp,
    default_inference_tp,
    parse_mesh,
)
from meshes.multihost import (
    default_mesh_shape,
    num_processes,
    on_first_process,
    simulate_cpu_devices,
    start_processes,
)
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.runtime.log import say, silence
from rlhf_jax.stages.checks import check_batches, check_data, check_models
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.ppo import run_ppo
from rlhf_jax.stages.reward import run_reward
from rlhf_jax.stages.run import Run, prepare_directory
from rlhf_jax.stages.sft import run_sft
from rlhf_jax.stages.summary import print_summary


def run_pipeline(cfg: TrainConfig, config_yaml: str) -> None:
    """Runs the stages of `cfg.step`; each reads what the one before left in `output_dir`.

    `config_yaml` is the resolved config as text, which is printed and saved first.

    Raises:
        ValueError, FileNotFoundError: the config asks for what is not there or does not fit.
    """
    started = time.perf_counter()
    use_compilation_cache()
    shape = start_devices(cfg)
    actor = find_pretrained(cfg.actor_model)
    inference_tp = choose_inference_tp(cfg, shape, actor)
    check_batches(cfg, shape)
    check_models(cfg, actor)
    check_data(cfg)
    on_first_process(lambda: prepare_directory(cfg, config_yaml))
    say(config_yaml.rstrip())
    describe(shape, inference_tp, actor)
    run = Run(cfg, shape, inference_tp)
    with run.watch_interrupts():
        for stage in cfg.stages:
            run_stage(run, stage, actor)
    print_summary(run.directory, time.perf_counter() - started)


def run_stage(run: Run, stage: StageName, actor: Pretrained) -> None:
    """Runs one stage, unless a resumed run has done it."""
    cfg = run.cfg
    if cfg.resume and run.is_done(stage):
        say(f"{stage}: done already")
        return
    began = time.perf_counter()
    run.timer.take()
    if stage == "sft":
        run_sft(run, actor)
    elif stage == "reward":
        run_reward(run, reward_base(run))
    else:
        run_ppo(run, trained(run, "sft", cfg.actor_model), trained(run, "reward", cfg.reward_model))
    say(f"{stage}: {time.perf_counter() - began:.0f} s")


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, outside the project."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        compilation_cache.set_cache_dir(str(home / "rlhf_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def start_devices(cfg: TrainConfig) -> MeshShape:
    """Starts JAX with as many devices as the mesh asks for; on a CPU they are simulated."""
    asked = parse_mesh(cfg.mesh) if cfg.mesh is not None else None
    wanted = asked.num_devices if asked else min(os.cpu_count() or 1, 2)
    simulate_cpu_devices(max(wanted // num_processes(), 1))
    start_processes()
    if jax.process_index() != 0:
        silence()
    shape = asked or default_mesh_shape()
    check_device_count(shape, len(jax.devices()))
    return shape


def choose_inference_tp(cfg: TrainConfig, shape: MeshShape, actor: Pretrained) -> int:
    """`--inference-tp-size`, or the largest that divides devices and heads."""
    if cfg.inference_tp_size is not None:
        check_inference_tp(shape, cfg.inference_tp_size)
        return cfg.inference_tp_size
    return default_inference_tp(shape, actor.cfg.num_heads, actor.cfg.num_kv_heads)


def describe(shape: MeshShape, inference_tp: int, actor: Pretrained) -> None:
    """Says what runs where."""
    device = jax.devices()[0]
    kind = "simulated CPU devices" if device.platform == "cpu" else device.device_kind
    cfg = actor.cfg
    say(
        f"mesh {shape}: {shape.num_devices} {kind}; decoding {inference_tp}-way tensor parallel; "
        f"{actor.name}: {cfg.num_params() / 1e6:.2f}M parameters, {cfg.num_layers} layers, "
        f"width {cfg.width}"
    )


def trained(run: Run, name: str, fallback: str) -> Pretrained:
    """What an earlier stage left in the output directory, or the model that was named."""
    directory = run.export_dir(name)
    return find_pretrained(str(directory) if directory.exists() else fallback)


def reward_base(run: Run) -> Pretrained:
    """The model that the reward model starts from."""
    if run.cfg.reward.train_from == "actor":
        return trained(run, "sft", run.cfg.actor_model)
    return find_pretrained(run.cfg.reward_model)
