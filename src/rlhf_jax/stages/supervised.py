"""The training loop of the two supervised stages."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax

from meshes.layout import Layout
from meshes.reshard import put_batch
from rlhf_jax.data.loader import Loader
from rlhf_jax.engine.state import TrainState
from rlhf_jax.engine.step import Metrics
from rlhf_jax.runtime.log import progress, say
from rlhf_jax.stages.config import StageName
from rlhf_jax.stages.run import Run

Update = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
Evaluate = Callable[[TrainState], Metrics]


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
            state, _ = checkpoints.restore(start, state)
            say(f"{stage}: resumed after step {start}")
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
                checkpoints.save(done, state, {"stage": stage, "step": done})
            if stopping:
                checkpoints.wait()
                run.stop(stage, done)
    return state, results


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
