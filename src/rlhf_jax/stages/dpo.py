"""Step dpo: direct preference optimization, in place of a reward model and PPO."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.data.batches import PairBatch, collate_pairs
from rlhf_jax.data.tokenize import PairRow, tokenize_pairs
from rlhf_jax.engine.row_passes import ModelOnMesh, answer_logprobs
from rlhf_jax.hf.export import save_hf
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.decoder import Remat
from rlhf_jax.models.params import Params, compute_layout, store_layout
from rlhf_jax.objectives.dpo import answer_logprob, dpo_loss
from rlhf_jax.objectives.losses import Metrics
from rlhf_jax.objectives.masked import length_mask
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.answers import HeldOutAnswers
from rlhf_jax.stages.rows import batches_of_one_length, count_rows, stage_rows
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.supervised import Task, train_supervised
from rlhf_jax.stages.supervised_config import DPOConfig
from rlhf_jax.stages.trainable import export_adapter, load_frozen, load_trainable


@flax.struct.dataclass
class ReferencedPairs:
    """Pairs with the reference model's log-probabilities of both answers."""

    pairs: PairBatch
    ref_chosen_B: jax.Array
    ref_rejected_B: jax.Array


def run_dpo(run: Run, base: Pretrained) -> None:
    """Trains `base`, with itself as the reference, and leaves it in `dpo/`."""
    cfg, model = run.cfg.dpo, base.cfg
    place, key = ModelOnMesh(model, compute_layout(model, run.mesh)), run.key(0, "init")
    rows = stage_rows(run, "dpo", base, tokenize_pairs)
    loader, eval_batches = batches_of_one_length(
        run, rows, collate_pairs, batch_size=cfg.batch_size, max_length=model.max_positions
    )
    asked = rows.held_out[: cfg.num_eval_prompts]
    part = cfg.batch_size // cfg.gradient_accumulation_steps
    answers = HeldOutAnswers(run, base, asked, part)
    num_answer = longest_answer([*rows.train, *rows.held_out])
    with jax.set_mesh(run.mesh):
        store = store_layout(model, run.mesh)
        start = load_trainable(base, cfg.lora, store, run.dtype, key=key)
        reference = load_frozen(
            run, base, start, offload=cfg.offload_reference_model, dtype=cfg.frozen_dtype, key=key
        )
        task = Task(
            stage="dpo",
            cfg=cfg,
            layout=place.layout,
            loss=partial(dpo_batch_loss, cfg=cfg, model=place, num_answer=num_answer),
            weight=num_pairs,
            shown=("loss", "rewards/accuracies", "rewards/margins"),
            prepare=partial(
                jax.jit(partial(with_reference, model=place, num_answer=num_answer)), reference
            ),
        )
        before = answers.measure(0, start.params)
        params, results = train_supervised(run, task, start, loader, eval_batches)
        after = answers.measure(int(results["steps"]), params)
        save_hf(
            run.export_dir("dpo"), params, model, run.cfg.dtype,
            base.tokenizer, base.source_config,
        )  # fmt: skip
        export_adapter(run, "dpo", base, cfg.lora, start.pick(params), fresh=start.fresh)
    if eval_batches:
        results["held_out_rows"] = count = count_rows(eval_batches)
        say(f"dpo: held-out accuracy {results['eval/rewards/accuracies']:.3f} ({count} pairs)")
    run.finish_stage("dpo", results | {"before": before, "after": after})


def longest_answer(rows: Sequence[PairRow]) -> int:
    """How many tokens the longest answer has; the first token of a row is predicted by nothing."""
    return max(max(len(row.chosen), len(row.rejected)) - max(row.prompt_length, 1) for row in rows)


def num_pairs(batch: Any) -> jax.Array:
    """How many pairs are real."""
    return batch.pairs.chosen.valid_B.sum()


def with_reference(
    reference: Params[jax.Array], pairs: PairBatch, *, model: ModelOnMesh, num_answer: int
) -> ReferencedPairs:
    """A batch as the loss reads it: the reference scores each pair once, outside the update."""
    return ReferencedPairs(pairs, *pair_logprobs(reference, pairs, model, num_answer, "none"))


def pair_logprobs(
    params: Params[jax.Array], pairs: Any, model: ModelOnMesh, num_answer: int, remat: Remat
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of chosen and rejected answers, `[B]` each, from one pass over 2B rows.

    A pair's rows stand side by side, so that no row moves to another device. Logits are computed
    at `num_answer` positions of every row: no answer is longer.
    """
    rows = jax.tree.map(side_by_side, pairs.chosen, pairs.rejected)
    starts = jnp.maximum(rows.prompt_lengths_B, 1)
    logprobs, _ = answer_logprobs(params, rows.tokens_BT, starts, num_answer, model, 1.0, remat)
    mask = length_mask(rows.lengths_B - starts, num_answer) & (rows.valid_B > 0)[:, None]
    both = answer_logprob(logprobs, mask).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def side_by_side(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
    """Two `[B, ...]` as one `[2B, ...]`: chosen, rejected, chosen, rejected, …"""
    return jnp.stack([chosen, rejected], axis=1).reshape(-1, *chosen.shape[1:])


def dpo_batch_loss(
    params: Params[jax.Array], batch: Any, *, cfg: DPOConfig, model: ModelOnMesh, num_answer: int
) -> tuple[jax.Array, Metrics]:
    """The loss of a batch of pairs, and its metrics."""
    chosen, rejected = pair_logprobs(params, batch.pairs, model, num_answer, cfg.remat)
    return dpo_loss(
        chosen,
        rejected,
        batch.ref_chosen_B,
        batch.ref_rejected_B,
        batch.pairs.chosen.valid_B,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
    )
