"""Which rows each stage gets: several sources, split among the stages, as DeepSpeed-Chat does it.

Its rule (`dschat/utils/data/data_utils.py`): each source is permuted and cut by `data_split`, one
part a stage; the parts of several sources are concatenated and permuted once more. Sizes are
natural, unless `data_weights` (which it has not) ask for proportions: those are the loader's to
keep, from the source numbers in the records. Equal seeds give equal rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from rlhf_jax.data.mixture import shares
from rlhf_jax.data.records import Example, Stage
from rlhf_jax.data.render import ChatFormat
from rlhf_jax.data.sources import QUICKSTART, Source, Split, load_source
from rlhf_jax.data.tokenize import Overlong

STAGE_INDEX: dict[Stage, int] = {"sft": 0, "reward": 1, "ppo": 2}
"""Which part of `data_split` belongs to a stage."""


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    Attributes:
        data_path: sources for all stages, blended: `quickstart`, files, folders, Hub ids, or any
            of the last three as `NAME@PATH`, to be read as that data set of the catalog.
        data_weights: how much of each source an epoch holds, for every one of `data_path` and then
            of `sft_only_data_path`; empty: all of its rows, once.
        sft_only_data_path: sources that only supervised fine-tuning sees, all of their rows.
        data_split: shares of the sft, reward and ppo stage in the rows of every source, `2,4,4`;
            empty: no split, every stage sees all rows.
        eval_fraction: share of the rows held out from a source that has no eval split. 0: none.
        overlong: rows over the maximum length are dropped, cut to it, or lose the oldest turns of
            their prompt, whole, until they fit.
        chat_format: conversations are written out by the model's chat template, or as
            `Human:`/`Assistant:` transcripts.
        margins: which ones the reward model's loss has: those of a column `margin`; or also
            differences in score of data sets that the catalog knows, as shares of the largest
            difference there can be; or none.
        max_rows: at most this many train and this many eval rows a stage, taken after the blend.
    """

    data_path: tuple[str, ...] = (QUICKSTART,)
    data_weights: tuple[float, ...] = ()
    sft_only_data_path: tuple[str, ...] = ()
    data_split: str = "2,4,4"
    eval_fraction: float = 0.1
    overlong: Literal["drop", "cut", "cut_turns"] = "drop"
    chat_format: Literal["template", "human_assistant"] = "template"
    margins: Literal["none", "column", "scores"] = "column"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.data_path:
            raise ValueError(f"data_path is empty: give at least one source, such as {QUICKSTART}")
        if self.data_split and len(split_shares(self.data_split)) != len(STAGE_INDEX):
            raise ValueError(
                f"data_split={self.data_split!r} has {len(split_shares(self.data_split))} parts: "
                "it needs 3 (sft, reward, ppo), such as 2,4,4, or is empty for no split"
            )
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: it must be in [0, 1)")
        check_choice("overlong", self.overlong, get_args(Overlong.__value__))
        check_choice("chat_format", self.chat_format, get_args(ChatFormat.__value__))
        check_choice("margins", self.margins, ("none", "column", "scores"))
        self._check_weights()
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows={self.max_rows}: it must be at least 1, or none for all")

    def _check_weights(self) -> None:
        sources = len(self.data_path) + len(self.sft_only_data_path)
        if self.data_weights and len(self.data_weights) != sources:
            raise ValueError(
                f"data_weights has {len(self.data_weights)} weights for {sources} sources: give "
                "one for each of data_path and then of sft_only_data_path, or none"
            )
        for weight in self.data_weights:
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"data_weights={self.data_weights}: {weight} is no weight, they are above 0 "
                    "(a source without weight is left out of data_path)"
                )


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """ValueError unless a setting has one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: it must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class StageRecords:
    """The text of one stage.

    Attributes:
        train: examples to train on.
        eval: examples held out.
        notes: a line a source: what was read, dropped and split.
        weights: of the sources whose numbers the train records have; empty: natural sizes.
    """

    train: list[Example]
    eval: list[Example]
    notes: tuple[str, ...]
    weights: tuple[float, ...] = ()


def split_shares(data_split: str) -> list[float]:
    """`2,4,4` as shares that sum to 1.

    Raises:
        ValueError: not numbers >= 0 with a positive sum.
    """
    try:
        parts = [float(part) for part in data_split.split(",")]
    except ValueError as error:
        raise ValueError(f"data_split={data_split!r}: write numbers, such as 2,4,4") from error
    if not all(0 <= part < float("inf") for part in parts) or sum(parts) <= 0:
        raise ValueError(f"data_split={data_split!r}: parts must be >= 0 and one above 0")
    return [part / sum(parts) for part in parts]


def permutation(num_rows: int, seed: int) -> np.ndarray:
    """DeepSpeed-Chat's `get_shuffle_idx`: a permutation of `num_rows` row numbers."""
    dtype = np.int64 if num_rows >= np.iinfo(np.uint32).max - 1 else np.uint32
    order = np.arange(num_rows, dtype=dtype)
    np.random.RandomState(seed).shuffle(order)
    return order


def split_indices(num_rows: int, data_split: str, stage_index: int, seed: int) -> np.ndarray:
    """The row numbers of one part of `data_split`, as `get_raw_dataset_split_index` gives them.

    With shares f: boundary_i = sum_{j<=i} round(f_j * num_rows); by how much the last one misses
    `num_rows` is taken off every boundary but the first (0). The part is the slice of
    `permutation(num_rows, seed)` between two boundaries.

    A boundary that this makes negative is 0 here: there DeepSpeed-Chat slices from the end and
    gives rows to two stages (3 rows in `0,5,5`).
    """
    shares = split_shares(data_split)
    if not 0 <= stage_index < len(shares):
        raise ValueError(f"data_split={data_split!r} has no part {stage_index}")
    boundaries = [0]
    for share in shares:
        boundaries.append(boundaries[-1] + round(share * num_rows))
    excess = boundaries[-1] - num_rows
    boundaries[1:] = [max(boundary - excess, 0) for boundary in boundaries[1:]]
    start, stop = boundaries[stage_index : stage_index + 2]
    return permutation(num_rows, seed)[start:stop]


def load_stage_records(config: DataConfig, stage: Stage, *, seed: int) -> StageRecords:
    """Read, split and blend what a stage trains and is evaluated on.

    `eval` may be empty (a fraction of 0, or too few rows); `train` may not.

    Raises:
        ValueError: the split has no share for the stage, or leaves it no train row; or what
            `load_source` raises.
        FileNotFoundError: as `load_source`.
    """
    _check_share(config, stage)
    parts = [_load_part(path, config, config.data_split, stage, seed) for path in config.data_path]
    only: list[_Part] = []
    if stage == "sft":
        only = [_load_part(path, config, "", stage, seed) for path in config.sft_only_data_path]
    held_out = _blended([part.eval for part in parts], [part.eval for part in only], seed)
    weights = config.data_weights[: len(parts) + len(only)]
    if weights:
        train = _numbered([*parts, *only], weights, config.max_rows)
    else:
        train = _blended([part.train for part in parts], [part.train for part in only], seed)
        train = train[: config.max_rows]
    if not train:
        raise ValueError(
            f"data_split={config.data_split!r} leaves stage {stage} none of the rows of "
            f"{', '.join(config.data_path)}: give it a larger share, or more rows"
        )
    notes = tuple(part.note for part in [*parts, *only])
    return StageRecords(
        train[: None if weights else config.max_rows], held_out[: config.max_rows], notes, weights
    )


def _check_share(config: DataConfig, stage: Stage) -> None:
    """ValueError for a share of 0 (whose part may have a row: shares are rounded)."""
    shares = split_shares(config.data_split) if config.data_split else [1.0] * len(STAGE_INDEX)
    other = config.sft_only_data_path if stage == "sft" else ()
    if not (shares[STAGE_INDEX[stage]] or other):
        raise ValueError(
            f"--data.data-split={config.data_split} has a share of 0 for stage {stage}: give it "
            "one (the shares are those of sft, reward and ppo), or leave the stage out of --step"
        )


@dataclass(frozen=True)
class _Part:
    """One stage's rows of one source."""

    train: list[Example]
    eval: list[Example]
    note: str


def _load_part(path: str, config: DataConfig, data_split: str, stage: Stage, seed: int) -> _Part:
    source = _load(path, config, "train", stage)
    assert source is not None, "only an eval split may be missing"
    train = source.records
    own_eval = _load(path, config, "eval", stage)
    if own_eval is not None:
        held_out = own_eval.records
    elif config.eval_fraction:
        halves = f"{1 - config.eval_fraction},{config.eval_fraction}"
        train, held_out = (
            [source.records[i] for i in split_indices(len(source.records), halves, n, seed)]
            for n in range(2)
        )
    else:
        held_out = []
    train, held_out = (_share(rows, data_split, stage, seed) for rows in (train, held_out))
    kind = f"{own_eval} in its eval split" if own_eval else "eval rows held out"
    note = f"{source} ({kind}); {stage} gets {len(train)} train and {len(held_out)} eval rows"
    shared = 0 if own_eval else _shared_prompts(train, held_out)
    if shared:
        whose = "have a prompt that is among the train rows"
        note += f"; {shared} of {len(held_out)} held-out rows {whose}"
    return _Part(train, held_out, note)


def _shared_prompts(train: list[Example], held_out: list[Example]) -> int:
    """How many rows that are held out ask what a train row asks; text without a prompt does not."""
    asked = {row.prompt for row in train if row.prompt}
    return sum(row.prompt in asked for row in held_out)


def _load(path: str, config: DataConfig, split: Split, stage: Stage) -> Source | None:
    """A split of a source, with the margins that are wanted."""
    source = load_source(path, split=split, stage=stage)
    wanted = config.margins
    if source is None or wanted == "scores" or (wanted == "column" and source.entry is None):
        return source
    return replace(source, records=[replace(row, margin=None) for row in source.records])


def _share(rows: list[Example], data_split: str, stage: Stage, seed: int) -> list[Example]:
    if not data_split:
        return _shuffled(rows, seed)
    return [rows[i] for i in split_indices(len(rows), data_split, STAGE_INDEX[stage], seed)]


def _blended(
    parts: Sequence[list[Example]], only: Sequence[list[Example]], seed: int
) -> list[Example]:
    """All rows once: those of `parts` permuted, and once more where `only` adds its own."""
    rows = [row for part in parts for row in part]
    rows = rows if len(parts) == 1 else _shuffled(rows, seed)
    return _shuffled([*rows, *(row for part in only for row in part)], seed) if only else rows


def _numbered(
    parts: Sequence[_Part], weights: Sequence[float], max_rows: int | None
) -> list[Example]:
    """Rows that know their source, source by source; `max_rows` are shared out by weight."""
    for part in parts:
        if not part.train:
            raise ValueError(f"{part.note}: nothing to give its weight to, so leave it out")
    limits: Sequence[int | None] = shares(max_rows, weights) if max_rows else [None] * len(parts)
    return [
        replace(row, source=number)
        for number, (part, limit) in enumerate(zip(parts, limits, strict=True))
        for row in part.train[:limit]
    ]


def _shuffled(rows: list[Example], seed: int) -> list[Example]:
    return [rows[i] for i in permutation(len(rows), seed)]
