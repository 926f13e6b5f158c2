"""Step 1: supervised fine-tuning on prompts and answers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import Layout
from rlhf_jax.data.batches import TextBatch, collate_text
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.packing import PackedBatch, Packing, collate_packed
from rlhf_jax.data.tokenize import tokenize_sft
from rlhf_jax.hf.export import save_hf
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import Remat, forward
from rlhf_jax.models.params import Params, compute_layout, store_layout
from rlhf_jax.models.scoring import score_tokens
from rlhf_jax.objectives.losses import Metrics, prediction_mask, sft_loss
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.rows import (
    PAD_MULTIPLE,
    batches_of_one_length,
    count_rows,
    packed_batches,
    stage_rows,
)
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.supervised import Task, train_supervised
from rlhf_jax.stages.supervised_config import SFTConfig
from rlhf_jax.stages.trainable import export_adapter, load_trainable


def run_sft(run: Run, base: Pretrained) -> None:
    """Trains `base` and leaves it in `sft/`."""
    cfg, model = run.cfg.sft, base.cfg
    compute = compute_layout(model, run.mesh)
    loader, eval_batches = sft_data(run, base)
    task = Task(
        stage="sft",
        cfg=cfg,
        layout=compute,
        loss=partial(sft_batch_loss, cfg=cfg, model=model, layout=compute),
        weight=partial(num_predictions, loss_on=cfg.loss_on),
        shown=("loss", "grad_norm"),
    )
    with jax.set_mesh(run.mesh):
        store = store_layout(model, run.mesh)
        start = load_trainable(base, cfg.lora, store, run.dtype, key=run.key(0, "init"))
        params, results = train_supervised(run, task, start, loader, eval_batches)
        save_hf(
            run.export_dir("sft"), params, model, run.cfg.dtype,
            base.tokenizer, base.source_config,
        )  # fmt: skip
        export_adapter(run, "sft", base, cfg.lora, start.pick(params), fresh=start.fresh)
    if eval_batches:
        results["eval/perplexity"] = perplexity(results["eval/cross_entropy"])
        results["held_out_rows"] = count = count_rows(eval_batches)
        say(f"sft: held-out perplexity {results['eval/perplexity']:.3f} ({count} rows)")
    run.finish_stage("sft", results)


def perplexity(cross_entropy: float) -> float:
    """`e^cross_entropy`, of nats a token; infinite where a model diverged beyond a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(cross_entropy))


def sft_data(
    run: Run, base: Pretrained
) -> tuple[Loader[TextBatch] | Loader[PackedBatch], list[TextBatch]]:
    """Training batches, and held-out ones (none where nothing is held out), never packed."""
    cfg, rows = run.cfg.sft, stage_rows(run, "sft", base, tokenize_sft)
    loader, eval_batches = batches_of_one_length(
        run, rows, collate_text, batch_size=cfg.batch_size, max_length=base.cfg.max_positions
    )
    if not cfg.packing:
        return loader, eval_batches
    parts = compute_layout(base.cfg, run.mesh).batch_size_divisor * cfg.gradient_accumulation_steps
    packing = Packing.of(
        [len(row.tokens) for row in rows.train], PAD_MULTIPLE,
        batch_size=cfg.batch_size, multiple=parts,
    )  # fmt: skip
    collate = partial(
        collate_packed, length=packing.length, answers_only=cfg.loss_on == "completion"
    )
    size = packing.sequences_per_batch(cfg.batch_size, parts)
    return packed_batches(run, "sft", rows.train, packing, collate, size), eval_batches


def num_predictions(batch: TextBatch | PackedBatch, loss_on: str) -> jax.Array:
    """How many predictions carry loss."""
    return loss_mask(batch, loss_on).sum().astype(jnp.float32)


def loss_mask(batch: Any, loss_on: Any) -> jax.Array:
    """Which predictions carry loss, `[B, T-1]`: entry t predicts token t + 1."""
    if isinstance(batch, PackedBatch):
        return jnp.asarray(batch.counted_BT)[:, 1:] > 0
    return prediction_mask(
        batch.lengths_B,
        batch.prompt_lengths_B,
        batch.valid_B,
        width=batch.tokens_BT.shape[1] - 1,
        train_on=loss_on,
    )


def starts_of(batch: Any) -> Any:
    """Where the row of each token begins, in packed batches."""
    return batch.starts_BT if isinstance(batch, PackedBatch) else None


def sft_batch_loss(
    params: Params[jax.Array], batch: Any, *, cfg: SFTConfig, model: ModelConfig, layout: Layout
) -> tuple[jax.Array, Metrics]:
    """Cross-entropy a token over the predictions that count, and its metrics."""
    logprobs, entropy = predictions(
        params, batch.tokens_BT, starts_of(batch), model, layout, cfg.remat
    )
    mask = loss_mask(batch, cfg.loss_on)
    loss = sft_loss(logprobs, mask)
    share = mask / jnp.maximum(mask.sum(), 1)
    return loss, {
        "cross_entropy": loss,
        "entropy": (entropy * share).sum(),
    }


def predictions(
    params: Params[jax.Array], tokens_BT: jax.Array, starts_BT: jax.Array | None,
    model: ModelConfig, layout: Layout, remat: Remat,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Log p of every next token and the entropy there, `[B, T-1]` each."""
    hidden = forward(params, tokens_BT, model, layout, starts_BT=starts_BT, remat=remat)
    return score_tokens(params, hidden[:, :-1], tokens_BT[:, 1:], model, layout, remat=remat)
