"""Rows of one file: JSON lines, JSON, Parquet, Arrow or plain text."""

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datasets import Dataset

type Rows = Iterator[tuple[int, Mapping[str, object]]]


@dataclass(frozen=True)
class Table:
    """Rows of one file or Hub split, with their numbers; `columns` None: those of the first row."""

    where: str
    unit: Literal["line", "row"]
    rows: Rows
    columns: tuple[str, ...] | None = None


def file_table(file: Path) -> Table:
    """The rows of a file.

    Raises:
        ValueError: a format that is not read, a damaged file, a malformed line.
    """
    suffix = format_of(file)
    if suffix is None:
        csv = f'datasets.Dataset.from_csv("{file.name}").to_json("{file.stem}.jsonl")'
        way = f". JSON lines of it, in Python: {csv}" if file.suffix.lower() == ".csv" else ""
        raise ValueError(
            f"{file}: files of this kind are not read. Allowed are {', '.join(FORMATS)}, "
            f"each also with .gz but Parquet and Arrow{way}"
        )
    return FORMATS[suffix](file)


def format_of(file: Path) -> str | None:
    """The key in `FORMATS` for a file's name, which may end in .gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] not in ([".parquet"], [".arrow"]):
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def dataset_table(dataset: "Dataset", where: str) -> Table:
    """The rows of what the `datasets` library read."""
    return Table(where, "row", enumerate(dataset), tuple(dataset.column_names))  # pyright: ignore[reportArgumentType]


def _json_lines(file: Path) -> Table:
    return Table(str(file), "line", _parse_lines(file, _lines(file)))


def _json(file: Path) -> Table:
    """A JSON array of objects; or, as many `.json` files are written, one object a line."""
    content = b"".join(_lines(file)).removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        return Table(str(file), "line", _parse_lines(file, content.splitlines()))
    rows = _parse(content, str(file))
    assert isinstance(rows, list)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number}: a {type(row).__name__}, not a JSON object")
    return Table(str(file), "row", enumerate(rows))


def _parquet(file: Path) -> Table:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        # It takes a pattern: `rows[1].parquet` would be rows1.parquet.
        found = datasets.load_dataset("parquet", data_files=glob.escape(str(file)), split="train")
    # ValueError and OSError are the base of what Arrow raises.
    except (DatasetsError, ValueError, OSError) as error:
        raise ValueError(f"{file}: not a Parquet file that can be read: {error}") from error
    assert isinstance(found, datasets.Dataset)
    return dataset_table(found, str(file))


def _arrow(file: Path) -> Table:
    """A shard of `save_to_disk` or of a cache of `datasets` (a stream), or an Arrow (IPC) file."""
    import datasets
    import pyarrow

    try:
        try:
            found = datasets.Dataset.from_file(str(file))
        except pyarrow.ArrowInvalid:
            with pyarrow.memory_map(str(file)) as source:
                found = datasets.Dataset(pyarrow.ipc.open_file(source).read_all())
    # ValueError and OSError are the base of what Arrow raises.
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not an Arrow file that can be read: {error}") from error
    return dataset_table(found, str(file))


def _plain_text(file: Path) -> Table:
    """Each line that is not blank is one row `text`."""
    decoded = (
        (number, _decode(line, f"{file}, line {number}").rstrip("\r\n"))
        for number, line in enumerate(_lines(file), 1)
    )
    return Table(str(file), "line", ((n, {"text": line}) for n, line in decoded if line.strip()))


FORMATS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _plain_text,
}


def _lines(file: Path) -> Iterator[bytes]:
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        try:
            first = stream.readline()
            if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError(f"{file}: this is UTF-16: save it as UTF-8")
            if first:
                yield first
            yield from stream
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{file}: damaged, or not gzip: {error}") from error


def _parse_lines(file: Path, lines: Iterable[bytes]) -> Rows:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        row = _parse(line.rstrip(b"\r\n"), where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a {type(row).__name__}, not a JSON object")
        yield number, row


def _parse(content: bytes, where: str) -> object:
    """JSON of one line or of a whole file."""
    try:
        return json.loads(_decode(content, where))
    except json.JSONDecodeError as error:
        place = where if ", line " in where else f"{where}, line {error.lineno}"
        raise ValueError(
            f"{place}: malformed JSON, {error.msg} at character {error.colno}. Every row is one "
            'object, like {"prompt": "…", "completion": "…"}'
        ) from error


def _decode(content: bytes, where: str) -> str:
    """UTF-8 as text, without a mark of the byte order: `json` would guess other encodings."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text: {error}") from error
