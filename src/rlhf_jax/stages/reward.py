"""Step 2: the reward model, from pairs of a better and a worse answer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshes.layout import Layout
from rlhf_jax.data.batches import PairBatch, collate_pairs
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.packing import PackedPairs, Packing, collate_packed_pairs
from rlhf_jax.data.tokenize import tokenize_pairs
from rlhf_jax.hf.export import save_reward_hf
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.decoder import forward
from rlhf_jax.models.params import (
    ScalarModel,
    compute_layout,
    store_layout,
)
from rlhf_jax.models.scoring import scalar_scores, take_positions
from rlhf_jax.objectives.losses import Metrics, PairwiseLoss, last_token_loss, pairwise_loss
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.rows import (
    PAD_MULTIPLE,
    batches_of_one_length,
    count_rows,
    packed_batches,
    stage_rows,
)
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.statistics_file import write_statistics
from rlhf_jax.stages.supervised import Task, train_supervised
from rlhf_jax.stages.supervised_config import RewardConfig
from rlhf_jax.stages.trainable import export_adapter, load_trainable

STATISTICS_BATCHES = 16


def run_reward(run: Run, base: Pretrained) -> None:
    """Trains `base` with a scalar head and leaves it in `reward/`."""
    cfg, model, directory = run.cfg.reward, base.cfg, run.export_dir("reward")
    compute = compute_layout(model, run.mesh)
    loader, eval_batches = reward_data(run, base)
    task = Task(
        stage="reward",
        cfg=cfg,
        layout=compute,
        loss=partial(pair_batch_loss, cfg=cfg, model=model, layout=compute),
        weight=num_pairs,
        shown=("loss", "accuracy", "grad_norm"),
    )
    with jax.set_mesh(run.mesh):
        store = store_layout(model, run.mesh)
        start = load_trainable(
            base, cfg.lora, store, run.dtype, scalar=True, key=run.key(0, "init")
        )
        params, results = train_supervised(run, task, start, loader, eval_batches)
        save_reward_hf(directory, params, model, run.cfg.dtype, base.tokenizer, base.source_config)
        used = [loader.batch(n) for n in range(min(STATISTICS_BATCHES, loader.num_batches))]
        statistics = task.measure()(params, used)
        export_adapter(
            run, "reward", base, cfg.lora, start.pick(params), fresh=start.fresh, scalar=True
        )
        for place in (directory, run.export_dir("reward_adapter")):
            if place.exists():
                write_statistics(place, statistics)
    if eval_batches:
        results["held_out_rows"] = count = count_rows(eval_batches)
        say(f"reward: held-out accuracy {results['eval/accuracy']:.3f} ({count} pairs)")
    run.finish_stage("reward", results)


def reward_data(
    run: Run, base: Pretrained
) -> tuple[Loader[PairBatch] | Loader[PackedPairs], list[PairBatch]]:
    """Training batches, and held-out ones (none where nothing is held out), never packed.

    A packed pair keeps both rows in one sequence, so that its loss needs one sequence alone.
    """
    cfg, rows = run.cfg.reward, stage_rows(run, "reward", base, tokenize_pairs)
    loader, eval_batches = batches_of_one_length(
        run, rows, collate_pairs, batch_size=cfg.batch_size, max_length=base.cfg.max_positions
    )
    if not cfg.packing:
        return loader, eval_batches
    parts = compute_layout(base.cfg, run.mesh).batch_size_divisor * cfg.gradient_accumulation_steps
    packing = Packing.of(
        [len(row.chosen) + len(row.rejected) for row in rows.train], PAD_MULTIPLE,
        batch_size=cfg.batch_size, multiple=parts,
    )  # fmt: skip
    collate = partial(collate_packed_pairs, length=packing.length, most_pairs=packing.most_rows)
    size = packing.sequences_per_batch(cfg.batch_size, parts)
    return packed_batches(run, "reward", rows.train, packing, collate, size), eval_batches


def num_pairs(batch: Any) -> jax.Array:
    """How many pairs are real."""
    return valid_pairs(batch).sum()


def valid_pairs(batch: Any) -> Any:
    """1 for every real pair, `[B]`; of packed pairs `[B, N]`."""
    return batch.valid_BN if isinstance(batch, PackedPairs) else batch.chosen.valid_B


def score_pairs(
    params: ScalarModel[jax.Array],
    batch: Any,
    *,
    cfg: RewardConfig,
    model: ModelConfig,
    layout: Layout,
) -> PairwiseLoss:
    """The loss of a batch of pairs and the scores at the last tokens."""

    def scores(tokens_BT: jax.Array, starts_BT: jax.Array | None = None) -> jax.Array:
        hidden = forward(
            params.body, tokens_BT, model, layout, starts_BT=starts_BT, remat=cfg.remat
        )
        return scalar_scores(params, hidden)

    if isinstance(batch, PackedPairs):
        packed: Any = batch
        scores_BT = scores(packed.tokens_BT, packed.starts_BT)
        return last_token_loss(
            take_positions(scores_BT, packed.chosen_ends_BN, layout),
            take_positions(scores_BT, packed.rejected_ends_BN, layout),
            packed.valid_BN,
            packed.margin_BN,
            center_coef=cfg.center_coef,
        )
    chosen, rejected = batch.chosen, batch.rejected
    return pairwise_loss(
        scores(chosen.tokens_BT),
        scores(rejected.tokens_BT),
        chosen.tokens_BT,
        rejected.tokens_BT,
        chosen.lengths_B,
        rejected.lengths_B,
        chosen.valid_B,
        batch.margin_B,
        span=cfg.span,
        center_coef=cfg.center_coef,
    )


def pair_batch_loss(
    params: ScalarModel[jax.Array],
    batch: Any,
    *,
    cfg: RewardConfig,
    model: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, Metrics]:
    """The mean pairwise loss and its metrics, each a mean over pairs."""
    pairs = score_pairs(params, batch, cfg=cfg, model=model, layout=layout)
    valid = valid_pairs(batch)
    share = valid / jnp.maximum(valid.sum(), 1)
    both = jnp.stack([pairs.chosen_scores_B, pairs.rejected_scores_B])
    return pairs.loss, {
        "pair_loss": pairs.loss,
        "accuracy": pairs.accuracy,
        "score_chosen": (pairs.chosen_scores_B * share).sum(),
        "score_rejected": (pairs.rejected_scores_B * share).sum(),
        "score_square": (jnp.square(both).mean(0) * share).sum(),
    }
