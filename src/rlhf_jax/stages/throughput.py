"""How fast an iteration of step 3 was."""

from collections.abc import Sequence
from typing import Any

from rlhf_jax.engine.step import Metrics
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.remat import repeats_layers
from rlhf_jax.runtime.profile import deepspeed_flops
from rlhf_jax.stages.ppo_rows import Scored
from rlhf_jax.stages.prompts import PromptData
from rlhf_jax.stages.run import Run


def throughput(
    run: Run, model: ModelConfig, data: PromptData, batches: Sequence[Scored], metrics: Metrics
) -> dict[str, Any]:
    """Samples a second by wall clock, tokens of answers a second of generation, and
    DeepSpeed-Chat's generation and training TFLOP/s: rows as long as they may be, filled up to
    whole batches, but for the share that packing left out of the update.
    """
    cfg, seconds, elapsed = run.cfg.ppo, run.timer.peek(), run.timer.elapsed()
    rows = cfg.batch_size * cfg.generation_batches
    length = data.max_prompt + cfg.max_answer_seq_len
    devices = run.mesh.size * 1e12
    passes = 4 if repeats_layers(cfg.remat) else 3
    num_samples = int(sum(batch.valid_B.sum() for batch in batches))
    generated = deepspeed_flops(model, rows, length, 1)
    trained = deepspeed_flops(model, rows * cfg.ppo_epochs, length, passes)
    trained *= 1 - metrics.get("perf/update_tokens_saved", 0)
    return {
        "perf/samples_per_second": num_samples / elapsed,
        "perf/generated_tokens_per_second": (
            num_samples * metrics["response_length/mean"] / seconds["generate"]
        ),
        "perf/generation_tflops_per_device": generated / seconds["generate"] / devices,
        "perf/actor_training_tflops_per_device": trained / seconds["update"] / devices,
    }
