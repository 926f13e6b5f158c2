"""What steps 1, 2 and dpo share: their program, their loop, their evaluation."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshes.layout import Layout
from meshes.reshard import put_batch
from rlhf_jax.data.loader import Loader
from rlhf_jax.engine.offloaded import create_offloaded
from rlhf_jax.engine.offloaded_steps import offloaded_train_step
from rlhf_jax.engine.optimizer import rate_metrics
from rlhf_jax.engine.state import TrainState, create_state
from rlhf_jax.engine.step import LossFn, WeightFn, train_step
from rlhf_jax.models.lora import combine
from rlhf_jax.objectives.losses import Metrics
from rlhf_jax.runtime.log import progress
from rlhf_jax.stages.config import StageName
from rlhf_jax.stages.rows import check_same_rows
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.supervised_config import SupervisedConfig
from rlhf_jax.stages.trainable import Trainable

Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Evaluate = Callable[[TrainState], Metrics]
Measure = Callable[[Any, list[Any]], Metrics]


@dataclass(frozen=True)
class Task:
    """What a stage minimises: `loss` is a mean over what `weight` counts (tokens, pairs).

    `layout` is where the loss computes, `shown` names the metrics of the progress bar. `prepare`
    makes of a batch on the devices what the loss reads: a program of its own, so that models which
    it runs are no part of the update.
    """

    stage: StageName
    cfg: SupervisedConfig
    layout: Layout
    loss: LossFn
    weight: WeightFn
    shown: tuple[str, ...]
    prepare: Callable[[Any], Any] = lambda batch: batch

    def measure(self) -> Measure:
        """A function of parameters and batches: the metrics' means over all batches."""
        judge = jax.jit(lambda params, batch: (self.weight(batch), self.loss(params, batch)[1]))

        def measure(params: Any, batches: list[Any]) -> Metrics:
            return mean_over(batches, lambda b: judge(params, self.prepare(b)), self.layout)

        return measure


def train_supervised(
    run: Run, task: Task, model: Trainable, loader: Loader[Any], eval_batches: list[Any]
) -> tuple[Any, dict[str, float]]:
    """Trains `model`: its parameters afterwards, and the stage's results (held-out metrics, steps,
    skipped).
    """
    cfg, measure, frozen = task.cfg, task.measure(), model.frozen
    key = run.key(0, f"dropout/{task.stage}") if model.drops else None
    num_steps = cfg.max_steps or cfg.num_train_epochs * loader.num_batches
    optimizer = model.optimizer(cfg.optimizer, num_steps)
    static: dict[str, Any] = {
        "loss_fn": task.loss,
        "weight_fn": task.weight,
        "optimizer": optimizer,
        "num_parts": cfg.gradient_accumulation_steps,
    }
    step = offloaded_train_step(**static) if cfg.offload else partial(train_step, **static)
    rates = model.rates(cfg.optimizer, num_steps)

    def step_with_rates(
        state: TrainState, batch: Any, frozen: Any, key: jax.Array | None
    ) -> tuple[TrainState, Metrics]:
        after, metrics = step(state, batch, frozen, key)
        return after, metrics | rate_metrics(rates, state.step)

    program = step_with_rates if cfg.offload else jax.jit(step_with_rates, donate_argnums=0)
    create = create_offloaded if cfg.offload else create_state

    def update(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return program(state, task.prepare(batch), frozen, key)

    def evaluate(state: TrainState) -> Metrics:
        means = measure(combine(state.params, frozen), eval_batches)
        return {f"eval/{name}": value for name, value in means.items()}

    state, results = fit(
        run, task.stage, create(model.trained, optimizer), loader, num_steps, task.layout,
        update, evaluate, task.shown,
    )  # fmt: skip
    held_out = {name: value for name, value in results.items() if name.startswith("eval/")}
    results = held_out | {"steps": num_steps, "skipped": int(state.skipped)}
    return combine(state.params, frozen), results


def fit(
    run: Run,
    stage: StageName,
    state: TrainState,
    loader: Loader[Any],
    num_steps: int,
    layout: Layout,
    update: Update,
    evaluate: Evaluate,
    shown: tuple[str, ...],
) -> tuple[TrainState, dict[str, float]]:
    """Trains for `num_steps`, or for the rest of them after a resume.

    Held-out evaluation before, every `eval_interval` and after; a checkpoint every
    `save_interval` and at the end. Returns the state and the last evaluation.
    """
    cfg = run.cfg
    with run.checkpoints(stage) as checkpoints, ExitStack() as stack:
        start = checkpoints.latest_step() if cfg.resume else None
        bar = stack.enter_context(
            progress(stage, num_steps, done=start or 0, every=cfg.log_interval)
        )
        if start is not None:
            saved = checkpoints.meta(start)
            check_same_rows(stage, saved, {"data": loader.fingerprint})
            check_same_batches(stage, saved, loader)
            state = checkpoints.restore(start, state, free=True)
        run.begin(stage, start)
        results: dict[str, float] = {}
        if start is None:
            results = run.log(stage, 0, evaluate(state))
        elif start == num_steps:  # its row was written before the interruption
            results = {name: float(value) for name, value in evaluate(state).items()}
        for step, batch in loader.batches(start or 0, num_steps):
            state, metrics = update(state, put_batch(batch, layout))
            done = step + 1
            evaluating, live = run.due(cfg.eval_interval, done, num_steps), None
            logging = evaluating or run.due(cfg.log_interval, done, num_steps)
            if evaluating:
                with run.timer.phase("evaluate") as wait:
                    metrics |= evaluate(state)
                    wait.append(metrics)
            if logging:
                values = run.log(stage, done, metrics)
                live = {name: values[name] for name in shown}
                results = values if evaluating else results
            bar.update(done, live)
            stopping = run.should_stop(logged=logging)
            if stopping or run.due(cfg.save_interval, done, num_steps):
                meta = {"stage": stage, "step": done, "data": loader.fingerprint}
                checkpoints.save(done, state, meta | {"batch_size": loader.batch_size})
            if stopping:
                checkpoints.wait()
                run.stop(stage, done)
    return state, results


def check_same_batches(stage: StageName, saved: Mapping[str, Any], loader: Loader[Any]) -> None:
    """ValueError where the epochs of a resumed run are cut into other batches than before: how many
    sequences a packed batch has follows the mesh.
    """
    before = saved.get("batch_size", loader.batch_size)
    if before != loader.batch_size:
        raise ValueError(
            f"--resume: a batch of {stage} had {before} packed sequences and has "
            f"{loader.batch_size} on this mesh, so rows would be left out or seen twice: use a "
            "mesh that shares a batch among as many devices as before, or a new --output-dir"
        )


def mean_over(
    batches: list[Any], evaluate: Callable[[Any], tuple[jax.Array, Metrics]], layout: Layout
) -> Metrics:
    """Metrics of several batches, each weighted by what it counts (tokens, pairs)."""
    total: jax.Array | float = 0.0
    sums: Metrics = {}
    for batch in batches:
        weight, metrics = evaluate(put_batch(batch, layout))
        total = total + weight
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + weight * value
    return {name: value / total for name, value in sums.items()}
