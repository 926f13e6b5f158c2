"""The prompts of step 3: batches to answer in training, and held-out ones for evaluation."""

from dataclasses import dataclass
from functools import partial

from rlhf_jax.data.batches import PromptBatch, bucket_of, collate_prompts, prompt_buckets
from rlhf_jax.data.blend import load_stage_records
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.tokenize import PromptRow, tokenize_prompts
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.run import Run

PAD_MULTIPLE = 8


@dataclass(frozen=True)
class PromptData:
    """`held_out` are the rows behind the batches of `evaluation`, in order."""

    train: Loader[PromptBatch]
    evaluation: list[PromptBatch]
    held_out: list[PromptRow]
    max_prompt: int


def ppo_data(run: Run, actor: Pretrained) -> PromptData:
    """Reads, tokenises and batches prompts. Where nothing is held out, evaluation is empty.

    Raises:
        ValueError: prompts and answers together do not fit the actor's positions.
    """
    cfg, data = run.cfg.ppo, run.cfg.data
    check_positions(cfg.max_prompt_seq_len, cfg.max_answer_seq_len, actor)
    records = load_stage_records(data, "ppo", seed=run.cfg.seed)
    for note in records.notes:
        say(note)
    tokenize = partial(
        tokenize_prompts,
        tokenizer=actor.tokenizer,
        max_length=cfg.max_prompt_seq_len,
        overlong=data.overlong,
    )
    rows, report = tokenize(records.train)
    say(f"ppo: {report}")
    held_out = tokenize(records.eval)[0] if records.eval else []
    held_out = held_out[: cfg.num_eval_prompts]
    buckets = prompt_buckets(
        [*rows, *held_out], max_buckets=cfg.max_prompt_buckets, pad_multiple=PAD_MULTIPLE
    )
    buckets = tuple(sorted({min(bucket, cfg.max_prompt_seq_len) for bucket in buckets}))
    collate = partial(collate_prompts, buckets=buckets)
    train = Loader(
        rows,
        collate,
        batch_size=cfg.batch_size,
        seed=run.cfg.seed,
        group_of=lambda row: bucket_of(len(row.tokens), buckets),
    )
    starts = range(0, len(held_out), cfg.batch_size)
    evaluation = [collate(held_out[n : n + cfg.batch_size], cfg.batch_size) for n in starts]
    return PromptData(train, evaluation, held_out, max(buckets))


def check_positions(prompt: int, answer: int, actor: Pretrained) -> None:
    """ValueError where the longest prompt and answer exceed the position table."""
    room = actor.cfg.max_positions
    if prompt + answer > room:
        raise ValueError(
            f"--ppo.max-prompt-seq-len={prompt} and --ppo.max-answer-seq-len={answer} make "
            f"{prompt + answer} tokens, {actor.name} has {room} positions: "
            f"lower them to {room} together"
        )
