"""The rows of a stage: read, tokenised and counted; for steps 1 and 2 their batches too."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Protocol

import jax
from transformers import PreTrainedTokenizerBase

from rlhf_jax.data.batches import PairBatch, TextBatch, common_length
from rlhf_jax.data.blend import QUICKSTART, StageRecords, load_stage_records
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.mixture import Mixture
from rlhf_jax.data.packing import Packing
from rlhf_jax.data.records import Example
from rlhf_jax.data.render import ChatFormat
from rlhf_jax.data.tokenize import Overlong, TokenizeReport
from rlhf_jax.data.turn_format import trained_format
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.runtime.disk import replace_text
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.config import StageName, TrainConfig
from rlhf_jax.stages.ppo_rows import count_updates
from rlhf_jax.stages.run import Run

PAD_MULTIPLE = 16
"""Rows of steps 1 and 2 are padded to a multiple of this many tokens."""
FEW_STEPS = 10
"""A stage of fewer gets a note."""
ROWS_FILE = "rows.json"
"""In the output directory: what each stage read and dropped, for the report."""


class Tokenize[Row](Protocol):
    """One of `data.tokenize`'s functions."""

    def __call__(
        self,
        records: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        overlong: Overlong,
        chat_format: ChatFormat,
        stop_ids: Collection[int],
    ) -> tuple[list[Row], TokenizeReport]: ...


@dataclass(frozen=True)
class StageRows[Row]:
    """What a stage trains on and is evaluated on (may be empty). `notes` says how they came
    about, a line each; `report` counts those of `train`; `mixture` how often a weighted blend
    shows the rows of each source; `turn_format` how they write a question, as `trained_format`
    says.
    """

    train: list[Row]
    held_out: list[Row]
    notes: tuple[str, ...]
    report: TokenizeReport
    mixture: Mixture | None = None
    turn_format: str | None = None


def read_rows[Row](
    cfg: TrainConfig, stage: StageName, model: Pretrained, tokenize: Tokenize[Row]
) -> StageRows[Row]:
    """The rows of a stage with the tokens of `model`; prints nothing.

    Raises:
        ValueError: tokenising leaves no row to train on, or what `load_stage_records` raises.
        FileNotFoundError: as `load_stage_records`.
    """
    flag, max_length = length_limit(cfg, stage)
    records = read_records(cfg, stage)
    settings: dict[str, Any] = {
        "max_length": max_length,
        "overlong": cfg.data.overlong,
        "chat_format": cfg.data.chat_format,
        "stop_ids": model.cfg.stop_ids,
    }
    train, report = tokenize(records.train, model.tokenizer, **settings)
    ways = flag + " or --data.overlong=cut" * (cfg.data.overlong == "drop")
    fixes = list(remedies(cfg, stage, report))
    if not train:
        advice = ", or ".join([*fixes, "give other data"])
        raise ValueError(
            f"{stage}: of {len(records.train)} train rows none is left after tokenising: {report}. "
            f"{advice.capitalize()}"
        )
    mixture = mixture_of(cfg, train, records.weights, report, fixes) if records.weights else None
    notes = [*records.notes, f"{stage}: {counted(report, ways)}"]
    if mixture is not None:
        paths = (*cfg.data.data_path, *cfg.data.sft_only_data_path)
        each = zip(mixture.counts, paths, strict=False)
        shown = ", ".join(f"{count} of {path}" for count, path in each)
        notes.append(f"{stage}: an epoch has {shown}")
    held_out: list[Row] = []
    if records.eval:
        held_out, other = tokenize(records.eval, model.tokenizer, **settings)
        nothing = "" if held_out else "; nothing is evaluated"
        said = other if report.dropped else counted(other, ways)
        notes.append(f"{stage} held out: {said}{nothing}")
    form = trained_format(records.train, cfg.data.chat_format)
    return StageRows(train, held_out, tuple(notes), report, mixture, form)


def counted(report: TokenizeReport, ways: str) -> str:
    """The report; where rows were too long, with the flags that keep them."""
    return f"{report}; to keep them: {ways}" if report.dropped else str(report)


def remedies(cfg: TrainConfig, stage: StageName, report: TokenizeReport) -> Iterator[str]:
    """What keeps rows that were left out, by the reasons why they were."""
    flag, max_length = length_limit(cfg, stage)
    overlong = cfg.data.overlong
    if report.dropped or (report.equal and overlong == "cut"):  # or made equal by the cut
        yield f"raise {flag}={max_length}"
    if report.dropped and overlong == "drop":
        yield "use --data.overlong=cut"
    if report.empty:
        yield f"fill in {'prompts' if stage == 'ppo' else 'answers'} that are empty"


def read_records(cfg: TrainConfig, stage: StageName) -> StageRecords:
    """The text of a stage. Step dpo trains on the pairs that step 2 would train on."""
    if stage != "dpo":
        return load_stage_records(cfg.data, stage, seed=cfg.seed)
    try:
        return load_stage_records(cfg.data, "reward", seed=cfg.seed)
    except ValueError as error:
        raise ValueError(f"step dpo trains on the pairs of stage reward: {error}") from error


def mixture_of(
    cfg: TrainConfig,
    rows: Sequence[Any],
    weights: Sequence[float],
    report: TokenizeReport,
    fixes: Sequence[str],
) -> Mixture:
    """The mixture of a weighted blend; ValueError where tokenising leaves a source no row."""
    sources = [row.source for row in rows]
    paths = (*cfg.data.data_path, *cfg.data.sft_only_data_path)
    empty = [paths[n] for n in sorted({*range(len(weights))} - {*sources})]
    if empty:
        advice = ", or ".join([*fixes, "leave it out"])
        raise ValueError(
            f"tokenising leaves no train row of {', '.join(empty)}, which has a weight in "
            f"--data.data-weights: {report}. {advice.capitalize()}"
        )
    return Mixture.of(sources, weights)


def stage_rows[Row](
    run: Run, stage: StageName, model: Pretrained, tokenize: Tokenize[Row]
) -> StageRows[Row]:
    """`read_rows`, whose notes are said, with more on what becomes of the rows, and kept in
    `ROWS_FILE`.
    """
    rows = read_rows(run.cfg, stage, model, tokenize)
    notes = [*rows.notes, *remarks(run.cfg, stage, model, len(rows.train), len(rows.held_out))]
    for note in notes:
        say(note)
    if jax.process_index() == 0:
        path = run.directory / ROWS_FILE
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        left_out = rows.report.left_out
        known[stage] = {"rows": len(rows.train), "dropped": left_out, "notes": notes}
        replace_text(path, json.dumps(known, indent=2) + "\n")
    return rows


def remarks(
    cfg: TrainConfig, stage: StageName, model: Pretrained, num_train: int, num_held_out: int
) -> Iterator[str]:
    """What a person may not expect of a stage with this model and so many rows."""
    if model.name == QUICKSTART and cfg.data.data_path != (QUICKSTART,):
        alone = stage == "reward" and cfg.reward.train_from == "reward_model"
        yield (
            f"{stage} trains quickstart, an untrained model of {length_limit(cfg, stage)[1]} "
            f"tokens a row: give --{'reward' if alone else 'actor'}-model for a real one"
        )
    settings = {"sft": cfg.sft, "reward": cfg.reward, "dpo": cfg.dpo, "ppo": cfg.ppo}[stage]
    batch, lower = settings.batch_size, f"lower --{stage}.batch-size"
    steps = settings.num_train_epochs * -(-num_train // batch)
    steps = -(-steps // cfg.ppo.generation_batches) if stage == "ppo" else steps
    if settings.max_steps is None and steps < FEW_STEPS:
        yield (
            f"{stage}: {num_train} rows in batches of {batch} make {steps} "
            f"step{'s' * (steps != 1)}: {lower} or raise --{stage}.num-train-epochs"
        )
    elif num_train < batch:
        yield f"{stage}: a batch of {batch} is larger than the {num_train} rows: {lower}"
    updates = settings.max_steps or steps
    if stage == "ppo":
        sizes = cycle(min(batch, num_train - first) for first in range(0, num_train, batch))
        updates = count_updates(cfg.ppo, islice(sizes, updates * cfg.ppo.generation_batches))
    if 0 < updates <= (warmup := settings.num_warmup_steps):
        yield (
            f"{stage}: --{stage}.num-warmup-steps={warmup} is no less than its {updates} optimizer "
            f"step{'s' * (updates != 1)}: the learning rate only rises, to "
            f"{updates / warmup:.1%} of what is set: lower it"
        )
    flag, most = "--eval-batches", cfg.eval_batches * batch
    if stage == "ppo":
        flag, most = "--ppo.num-eval-prompts", cfg.ppo.num_eval_prompts
    if most < num_held_out:
        yield f"{stage}: {most} of {num_held_out} held-out rows are evaluated ({flag})"
    at_end = cfg.ppo.standardize_score and cfg.ppo.reward_model_weight
    if stage == "ppo" and at_end and not cfg.ppo.train_eos:
        yield (
            "ppo: --ppo.no-train-eos reads scores before the token that ends an answer, and the "
            "mean and deviation that standardise them are those at it: take them from the answers "
            "with --ppo.no-standardize-score --ppo.score-scaling=running_mean_std"
        )


def check_same_rows(stage: StageName, saved: Mapping[str, Any], rows: Mapping[str, str]) -> None:
    """ValueError where a resumed run has other train rows than the checkpoint that says `saved`.

    `rows` are fingerprints, by what the rows are.
    """
    for what, now in rows.items():
        before = saved.get(what, now)  # older checkpoints do not say
        if before != now:
            raise ValueError(
                f"--resume: {stage} was trained on other {what}: {before} then, {now} now. Put "
                "back what it was trained on, or start anew with --overwrite-output-dir"
            )


def count_rows(batches: Sequence[TextBatch] | Sequence[PairBatch]) -> int:
    """How many rows (pairs) batches hold."""
    texts = [batch.chosen if isinstance(batch, PairBatch) else batch for batch in batches]
    return int(sum(text.valid_B.sum() for text in texts))


def length_limit(cfg: TrainConfig, stage: StageName) -> tuple[str, int]:
    """How many tokens a row of a stage may have, and the flag that says so."""
    if stage == "ppo":
        return "--ppo.max-prompt-seq-len", cfg.ppo.max_prompt_seq_len
    settings = {"sft": cfg.sft, "reward": cfg.reward, "dpo": cfg.dpo}[stage]
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

    train = Loader(rows.train, pad, batch_size=batch_size, seed=run.cfg.seed, mixture=rows.mixture)
    starts = range(0, len(rows.held_out), batch_size)[: run.cfg.eval_batches]
    return train, [pad(rows.held_out[n : n + batch_size], batch_size) for n in starts]


def packed_batches[Row, Batch](
    run: Run,
    stage: StageName,
    rows: Sequence[Row],
    packing: Packing,
    collate: Callable[[Sequence[Sequence[Row]], int], Batch],
    size: int,
) -> Loader[Batch]:
    """Training batches of `size` sequences with several rows each; says what came of it."""
    count, unit = packing.num_sequences, "pairs" if stage == "reward" else "rows"
    say(
        f"{stage}: {len(rows)} {unit} packed into {count} sequences of {packing.length} tokens, "
        f"{packing.filled:.1%} full; a step has {size} of them, {size * len(rows) / count:.1f} "
        f"{unit} on average"
    )
    return Loader(rows, collate, batch_size=size, seed=run.cfg.seed, packing=packing)
