"""Rows to records: by the data set's name where the catalog has it, else by their columns."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from rlhf_jax.data.catalog import CATALOG, Entry, Numbered
from rlhf_jax.data.conversations import read_text
from rlhf_jax.data.fields import Row
from rlhf_jax.data.files import Table
from rlhf_jax.data.records import Example, Stage, Text
from rlhf_jax.data.shapes import LABEL, MARGIN, Shape, is_good, shape_for, with_margin

BY_COLUMNS = "columns"
"""`columns@PATH`: whatever a path is called, its rows are read by their columns."""


@dataclass(frozen=True)
class Naming:
    """How a path is read.

    Attributes:
        path: where the rows lie.
        entry: of the catalog, None to read by columns.
        required: whether rows without the entry's columns are an error, or read by columns.
    """

    path: str
    entry: Entry | None
    required: bool = False


def naming_of(path: str) -> Naming:
    """`NAME@PATH`, or a path that contains the name of an entry."""
    name, at, rest = path.partition("@")
    if at and name == BY_COLUMNS:
        return Naming(rest, None)
    named = [entry for entry in CATALOG if at and entry.name == name]
    if named:
        return Naming(rest, named[0], required=True)
    within = [entry for entry in CATALOG if entry.name in path]
    return Naming(path, max(within, key=lambda entry: len(entry.name), default=None))


@dataclass(frozen=True)
class Reading:
    """The records of a table, and how many rows were left out for each reason.

    `read_as` names the shape of rows with columns that it does not have, and those columns.
    """

    records: list[Example]
    dropped: Mapping[str, int]
    entry: str | None
    read_as: str = ""


@dataclass(frozen=True)
class _Reader:
    """How each row of a table becomes a record; `extra` columns go to reward functions, and where
    `rest` is not None all that are not in it, which later rows of JSON may be the first to have.

    `read_as` as in `Reading`.
    """

    name: str
    needed: tuple[str, ...]
    convert: Callable[[Row, str], Example | str]
    extra: tuple[str, ...]
    merge: Callable[[Numbered], Numbered] | None = None
    read_as: str = ""
    rest: Collection[str] | None = None


def read_table(table: Table, stage: Stage, naming: Naming) -> Reading:
    """Convert every row as the first one.

    Raises:
        ValueError: a column is missing, a value is of the wrong kind, or the stage cannot use
            the rows.
    """
    numbered, columns = table.rows, table.columns
    if columns is None:
        first = next(numbered, None)
        if first is None:
            return Reading([], {}, None)
        columns, numbered = tuple(first[1]), chain([first], numbered)
    entry = _applicable(naming, columns, table.where)
    reader = _by_entry(entry, columns, stage, table.where) if entry else _by_columns(
        shape_for(columns, stage, table.where), columns, stage
    )  # fmt: skip
    records: list[Example] = []
    names = dict.fromkeys(reader.extra)
    dropped: Counter[str] = Counter()
    checked = _checked(numbered, reader, table)
    for number, row in reader.merge(checked) if reader.merge else checked:
        record = reader.convert(row, f"{table.where}, {table.unit} {number}")
        if isinstance(record, str):
            dropped[record] += 1
            continue
        if reader.rest is not None:
            names |= dict.fromkeys(name for name in row if name not in reader.rest)
        records.append(replace(record, columns={n: row.get(n) for n in names}) if names else record)
    read_as = reader.read_as
    if len(names) > len(reader.extra):
        records = [
            replace(record, columns={n: record.columns.get(n) for n in names}) for record in records
        ]
        read_as = "" if entry else described(reader.name, "for reward functions", names)
    return Reading(records, dropped, entry.name if entry else None, read_as)


def described(shape: str, use: str, columns: Collection[str]) -> str:
    """A shape, and the columns of rows that it does not have."""
    return f"{shape} (columns {use}: {', '.join(columns)})" if columns else ""


def _checked(rows: Numbered, reader: _Reader, table: Table) -> Numbered:
    for number, row in rows:
        for name in reader.needed:
            if name not in row:
                raise ValueError(
                    f"{table.where}, {table.unit} {number}: column {name!r} is missing. The first "
                    f"row is {reader.name}; this one has: {', '.join(sorted(row)) or 'nothing'}"
                )
        yield number, row


def _applicable(naming: Naming, columns: Collection[str], where: str) -> Entry | None:
    """The entry of a path, if rows with these columns are its."""
    entry = naming.entry
    missing = [name for name in entry.needed if name not in columns] if entry else []
    if entry and missing and naming.required:
        raise ValueError(
            f"{where}: a row of {entry.name} has the columns {', '.join(entry.needed)}; missing "
            f"are {', '.join(missing)}. Give {naming.path} without {entry.name}@ to read it by "
            "its columns"
        )
    return None if missing else entry


def _by_entry(entry: Entry, columns: tuple[str, ...], stage: Stage, where: str) -> _Reader:
    if stage not in entry.stages:
        raise ValueError(
            f"{where}: {entry.name} has {'no pairs' if entry.chosen else 'prompts alone'}, which "
            f"stage {stage} needs: give {stage} other data (--data.sft-only-data-path takes data "
            "for stage sft alone)"
        )
    kept = entry.keep
    if kept is None:
        kept = tuple(name for name in columns if name not in entry.needed)
    extra = kept if stage == "ppo" else ()
    rest = entry.needed if stage == "ppo" and entry.keep is None else None
    return _Reader(entry.name, entry.needed, entry.convert, extra, entry.merge, rest=rest)


def _by_columns(shape: Shape, columns: tuple[str, ...], stage: Stage) -> _Reader:
    has_margin = "rejected" in shape.columns
    takes_label = "completion" in shape.columns and stage != "ppo"
    has_label = takes_label and LABEL in columns

    def convert(row: Row, where: str) -> Example | str:
        if has_label and not is_good(row.get(LABEL), where):
            return f"{LABEL} is false"
        if LABEL in row and takes_label and not has_label:
            raise ValueError(
                f"{where}: it has a {LABEL!r} and the first row has none: give one to every row"
            )
        texts: dict[str, Text] = {}
        for name in shape.columns:
            text = read_text(row[name], name, where)
            if text is None:
                return "a value is null"
            texts[name] = text
        record = shape.convert(texts)
        if isinstance(record, str) or not has_margin:
            return record
        return with_margin(record, row.get(MARGIN), where)

    known = {*shape.columns, *[MARGIN] * has_margin}
    extra = tuple(name for name in columns if name not in known)
    unused = [name for name in extra if not (has_label and name == LABEL)]
    read_as = described(
        shape.name, "for reward functions" if stage == "ppo" else "not used", unused
    )
    given, rest = (extra, known) if stage == "ppo" else ((), None)
    return _Reader(shape.name, shape.columns, convert, given, read_as=read_as, rest=rest)
