"""The rows of a stage: read, tokenised and counted; for steps 1 and 2 their batches too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.batches import common_length
from rlhf_jax.data.blend import load_stage_records
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.records import Record
from rlhf_jax.data.tokenize import Overlong, TokenizeReport
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.run import Run

PAD_MULTIPLE = 16
"""Rows of steps 1 and 2 are padded to a multiple of this many tokens."""


class Tokenize[Row](Protocol):
    """One of `data.tokenize`'s functions."""

    def __call__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        overlong: Overlong,
    ) -> tuple[list[Row], TokenizeReport]: ...


@dataclass(frozen=True)
class StageRows[Row]:
    """What a stage trains on and is evaluated on (may be empty). `notes` says how they came
    about, a line each.
    """

    train: list[Row]
    held_out: list[Row]
    notes: tuple[str, ...]


def read_rows[Row](
    cfg: TrainConfig, stage: StageName, model: Pretrained, tokenize: Tokenize[Row]
) -> StageRows[Row]:
    """The rows of a stage with the tokens of `model`; prints nothing.

    Raises:
        ValueError: tokenising leaves no row to train on, or what `load_stage_records` raises.
        FileNotFoundError: as `load_stage_records`.
    """
    flag, max_length = length_limit(cfg, stage)
    records = load_stage_records(cfg.data, stage, seed=cfg.seed)
    settings: dict[str, Any] = {"max_length": max_length, "overlong": cfg.data.overlong}
    train, report = tokenize(records.train, model.tokenizer, **settings)
    if not train:
        cut = "use --data.overlong=cut, " if cfg.data.overlong == "drop" else ""
        raise ValueError(
            f"{stage}: of {len(records.train)} train rows none is left after tokenising: {report}. "
            f"Raise {flag}={max_length}, {cut}or give other data"
        )
    notes = [*records.notes, f"{stage}: {report}"]
    held_out: list[Row] = []
    if records.eval:
        held_out, report = tokenize(records.eval, model.tokenizer, **settings)
        nothing = "" if held_out else "; nothing is evaluated"
        notes.append(f"{stage} held out: {report}{nothing}")
    return StageRows(train, held_out, tuple(notes))


def stage_rows[Row](
    run: Run, stage: StageName, model: Pretrained, tokenize: Tokenize[Row]
) -> StageRows[Row]:
    """`read_rows`, whose notes are said."""
    rows = read_rows(run.cfg, stage, model, tokenize)
    for note in rows.notes:
        say(note)
    return rows


def length_limit(cfg: TrainConfig, stage: StageName) -> tuple[str, int]:
    """How many tokens a row of a stage may have, and the flag that says so."""
    if stage == "ppo":
        return "--ppo.max-prompt-seq-len", cfg.ppo.max_prompt_seq_len
    settings = cfg.sft if stage == "sft" else cfg.reward
    return f"--{stage}.max-seq-len", settings.max_seq_len


def batches_of_one_length[Batch](
    run: Run,
    rows: StageRows[Any],
    collate: Callable[..., Batch],
    *,
    batch_size: int,
    max_length: int,
) -> tuple[Loader[Batch], list[Batch]]:
    """Training batches, and the first `eval_batches` held-out ones in order (none where nothing
    is held out). All are as long as the longest row, rounded up but not beyond `max_length`.
    """
    length = min(common_length([*rows.train, *rows.held_out], PAD_MULTIPLE), max_length)

    def pad(some: Sequence[Any], size: int) -> Batch:
        return collate(some, size, length=length)

    train = Loader(rows.train, pad, batch_size=batch_size, seed=run.cfg.seed)
    starts = range(0, len(rows.held_out), batch_size)[: run.cfg.eval_batches]
    return train, [pad(rows.held_out[n : n + batch_size], batch_size) for n in starts]
