"""Rows of text from where they lie: built in, a file, a folder of files, or the Hub.

A path is tried as `quickstart` (built in), then as a local file or folder, then as a Hub id
(`owner/name` or `owner/name:config`). Files are JSON lines, JSON, Parquet or plain text.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_jax.data.records import Record, Shape, Stage, require_stage, shape_for

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

type Split = Literal["train", "eval"]
type Rows = Iterator[tuple[int, Mapping[str, object]]]

QUICKSTART = "quickstart"
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("eval", "validation", "valid", "dev", "test"),
}
"""Under which names a split is looked for; the first that is there is taken."""

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.-]+))?")
_SHARD = re.compile(r"-\d+-of-\d+(?=\.)")


@dataclass(frozen=True)
class Source:
    """One split of one path.

    Attributes:
        path: as the user wrote it.
        records: what was kept, in the order of the source.
        dropped: why rows were left out, and how many for each reason.
    """

    path: str
    records: list[Record]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lost = "".join(f", {n} dropped ({why})" for why, n in sorted(self.dropped.items()))
        return f"{self.path}: {len(self.records)} rows{lost}"


def load_source(path: str, *, split: Split, stage: Stage) -> Source | None:
    """Read one split of `path` for a stage; None when `path` has no eval split.

    A single file is all train.

    Raises:
        FileNotFoundError: `path` is neither there nor on the Hub, or a folder has no train file.
        ValueError: no rows, a malformed line, a missing column, a value that is not text, or
            rows in a shape that the stage cannot use.
    """
    if path == QUICKSTART:
        return _quickstart(split, stage)
    tables = _tables(path, split)
    if tables is None:
        return None
    parts = [_read(table, stage) for table in tables]
    records = list(chain.from_iterable(part.records for part in parts))
    dropped = sum((Counter(part.dropped) for part in parts), Counter[str]())
    source = Source(path, records, dict(dropped))
    if not records:
        why = f"all its rows were dropped: {source}" if dropped else "it holds no rows"
        raise ValueError(f"{path}: the {split} data set is empty ({why}). Give a path with rows")
    return source


def _quickstart(split: Split, stage: Stage) -> Source:
    from rlhf_jax.data import world

    records = world.load_records(split, stage)
    require_stage(records, stage, QUICKSTART)
    return Source(QUICKSTART, records)


@dataclass(frozen=True)
class _Table:
    """Rows of one file or Hub split, with their numbers; `columns` None: those of the first row."""

    where: str
    unit: Literal["line", "row"]
    rows: Rows
    columns: tuple[str, ...] | None = None


def _read(table: _Table, stage: Stage) -> Source:
    """Convert every row in the shape of the first one."""
    numbered = table.rows
    columns = table.columns
    if columns is None:
        first = next(numbered, None)
        if first is None:
            return Source(table.where, [])
        columns, numbered = tuple(first[1]), chain([first], numbered)
    shape = shape_for(columns, stage, table.where)
    records: list[Record] = []
    dropped: Counter[str] = Counter()
    for number, row in numbered:
        values = _text_columns(row, shape, f"{table.where}, {table.unit} {number}")
        record = "a value is null" if values is None else shape.convert(values)
        if isinstance(record, str):
            dropped[record] += 1
        else:
            records.append(record)
    return Source(table.where, records, dropped)


def _text_columns(row: Mapping[str, object], shape: Shape, where: str) -> dict[str, str] | None:
    """The shape's columns of a row; None when one of them is null."""
    values: dict[str, str] = {}
    for name in shape.columns:
        if name not in row:
            raise ValueError(
                f"{where}: column {name!r} is missing. The first row is {shape.name}; "
                f"this one has: {', '.join(sorted(row)) or 'nothing'}"
            )
        value = row[name]
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: column {name!r} holds a {type(value).__name__}, not text. "
                "Write conversations out as text with the model's chat template first"
            )
        values[name] = value
    return values


def _tables(path: str, split: Split) -> list[_Table] | None:
    """Where the rows of a split lie; None when there is no eval split."""
    local = Path(path).expanduser()
    if local.is_file():
        return [_file_table(local)] if split == "train" else None
    if local.is_dir():
        return _folder_tables(local, split)
    hub = _HUB_ID.fullmatch(path)
    if hub is None or _format_of(local) is not None:
        raise FileNotFoundError(
            f"{path}: no such file or folder ({local.absolute()}), and no Hub id either: one is "
            f"written owner/name or owner/name:config. Built-in data is called {QUICKSTART!r}"
        )
    return _dataset_tables(_fetch(hub["name"], hub["config"], path), path, split)


def _folder_tables(folder: Path, split: Split) -> list[_Table] | None:
    """`train.*` and `eval.*` in the folder or its `data/`; or what `save_to_disk` wrote."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        from datasets import load_from_disk

        return _dataset_tables(load_from_disk(folder), str(folder), split)
    for name in SPLIT_NAMES[split]:
        for inside in (folder, folder / "data"):
            files = sorted(file for file in inside.glob(f"{name}*") if _is_split(file, name))
            whole = [file.name for file in files if not _SHARD.search(file.name)]
            if whole and len(files) > 1:
                raise ValueError(
                    f"{inside}: several files claim to be {name}: "
                    f"{', '.join(file.name for file in files)}. Keep one, or name the file itself"
                )
            if files:
                return [_file_table(file) for file in files]
    if split == "eval":
        return None
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise FileNotFoundError(
        f"{folder}: no train.* or data/train.* ({', '.join(_FORMATS)}, each also .gz but Parquet). "
        f"The folder holds: {there}. Name the file itself, or call it train.*"
    )


def _is_split(file: Path, name: str) -> bool:
    """`train.jsonl.gz`, or a shard as the Hub writes it: `train-00000-of-00002.parquet`."""
    stem, _, suffix = _SHARD.sub("", file.name).partition(".")
    return stem == name and f".{suffix}".removesuffix(".gz") in _FORMATS


def _fetch(name: str, config: str | None, path: str) -> "DatasetDict":
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        found = datasets.load_dataset(name, config)
    # RuntimeError is what `datasets` raises for data sets that come as a script.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise FileNotFoundError(
            f"{path}: no such file or folder, and as a Hub id it could not be fetched: {error} "
            "Check the spelling and the network, or download the data and give its path"
        ) from error
    assert isinstance(found, datasets.DatasetDict)
    return found


def _dataset_tables(found: "Dataset | DatasetDict", path: str, split: Split) -> list[_Table] | None:
    """The table of a split of what the `datasets` library read."""
    splits = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    if not isinstance(found, dict):
        splits = {"train": found}
    for name in SPLIT_NAMES[split]:
        if name in splits:
            return [_dataset_table(splits[name], f"{path} ({name})")]
    if split == "eval":
        return None
    raise ValueError(f"{path}: it has no split `train`, only: {', '.join(splits)}")


def _dataset_table(dataset: "Dataset", where: str) -> _Table:
    return _Table(where, "row", enumerate(dataset), tuple(dataset.column_names))  # pyright: ignore[reportArgumentType]


def _file_table(file: Path) -> _Table:
    suffix = _format_of(file)
    if suffix is None:
        raise ValueError(
            f"{file}: files of this kind are not read. Allowed are {', '.join(_FORMATS)}, "
            "each also with .gz but Parquet"
        )
    return _FORMATS[suffix](file)


def _format_of(file: Path) -> str | None:
    """The key in `_FORMATS` for a file's name, which may end in .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _FORMATS else None


def _json_lines(file: Path) -> _Table:
    return _Table(str(file), "line", _parse_lines(file, _lines(file)))


def _json(file: Path) -> _Table:
    """A JSON array of objects; or, as many `.json` files are written, one object a line."""
    content = b"".join(_lines(file))
    if not content.lstrip().startswith(b"["):
        return _Table(str(file), "line", _parse_lines(file, content.splitlines()))
    rows = _parse(content, str(file))
    assert isinstance(rows, list)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number}: a {type(row).__name__}, not a JSON object")
    return _Table(str(file), "row", enumerate(rows))


def _parquet(file: Path) -> _Table:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        found = datasets.load_dataset("parquet", data_files=str(file), split="train")
    # ValueError and OSError are the base of what Arrow raises.
    except (DatasetsError, ValueError, OSError) as error:
        raise ValueError(f"{file}: not a Parquet file that can be read: {error}") from error
    assert isinstance(found, datasets.Dataset)
    return _dataset_table(found, str(file))


def _plain_text(file: Path) -> _Table:
    """Each line that is not blank is one row `text`."""
    lines = ((number, line.decode().rstrip("\r\n")) for number, line in enumerate(_lines(file), 1))
    return _Table(str(file), "line", ((number, {"text": line}) for number, line in lines if line))


_FORMATS: dict[str, Callable[[Path], _Table]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".txt": _plain_text,
}


def _lines(file: Path) -> Iterator[bytes]:
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        try:
            yield from stream
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{file}: damaged, or not gzip: {error}") from error


def _parse_lines(file: Path, lines: Iterable[bytes]) -> Rows:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        row = _parse(line, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a {type(row).__name__}, not a JSON object")
        yield number, row


def _parse(content: bytes, where: str) -> object:
    """JSON of one line or of a whole file."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        place = where if ", line " in where else f"{where}, line {error.lineno}"
        raise ValueError(
            f"{place}: malformed JSON, {error.msg} at character {error.colno}. Every row is one "
            'object, like {"prompt": "…", "completion": "…"}'
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text: {error}") from error
