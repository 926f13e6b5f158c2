"""Where rows of text lie: built in, a file, a folder of files, or the Hub.

A path is tried as `quickstart` (built in), then as a local file or folder, then as a Hub id
(`owner/name` or `owner/name:config`). `NAME@PATH` reads it as a data set of `catalog.CATALOG`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_jax.data.catalog import CATALOG, Entry
from rlhf_jax.data.files import FORMATS, Table, dataset_table, file_table, format_of
from rlhf_jax.data.reading import BY_COLUMNS, naming_of, read_table
from rlhf_jax.data.records import Example, Stage, require_stage

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

type Split = Literal["train", "eval"]

QUICKSTART = "quickstart"
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("eval", "validation", "valid", "dev", "test"),
}
"""Under which names a split is looked for; the first that is there is taken."""

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.-]+))?")
_SHARD = re.compile(r"-(\d+)-of-(\d+)(?=\.)")


@dataclass(frozen=True)
class Source:
    """One split of one path.

    Attributes:
        path: as the user wrote it.
        records: what was kept, in the order of the source.
        dropped: why rows were left out, and how many for each reason.
        entry: of the catalog, by which its rows were read; None: by their columns.
        read_as: the shape of rows with columns that it does not have, and those columns.
    """

    path: str
    records: list[Example]
    dropped: Mapping[str, int] = field(default_factory=dict)
    entry: str | None = None
    read_as: str = ""

    def __str__(self) -> str:
        named = f" of {self.entry}" if self.entry and self.entry != self.path else ""
        margins = any(record.margin is not None for record in self.records)
        named += " with margins" if margins else ""
        lost = "".join(f", {n} dropped ({why})" for why, n in sorted(self.dropped.items()))
        named += f", read as {self.read_as}" if self.read_as else ""
        return f"{self.path}: {len(self.records)} rows{named}{lost}"


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
    naming = naming_of(path)
    tables = _tables(naming.path, split, naming.entry)
    if tables is None:
        return None
    parts = [read_table(table, stage, naming) for table in tables]
    records = list(chain.from_iterable(part.records for part in parts))
    dropped = sum((Counter(part.dropped) for part in parts), Counter[str]())
    read_as = " or ".join(dict.fromkeys(part.read_as for part in parts if part.read_as))
    source = Source(path, records, dict(dropped), parts[0].entry, read_as)
    if not records:
        why = f"all its rows were dropped: {source}" if dropped else "it holds no rows"
        raise ValueError(f"{path}: the {split} data set is empty ({why}). Give a path with rows")
    return source


def local_path(path: str) -> Path:
    """Where a data path lies if it is a local one."""
    return Path(naming_of(path).path).expanduser()


def _quickstart(split: Split, stage: Stage) -> Source:
    from rlhf_jax.data import world

    records = world.load_records(split, stage)
    require_stage(records, stage, QUICKSTART)
    return Source(QUICKSTART, list[Example](records))


def _tables(path: str, split: Split, entry: Entry | None) -> list[Table] | None:
    """Where the rows of a split lie; None when there is no eval split."""
    names = (*(entry.splits.get(split, ()) if entry else ()), *SPLIT_NAMES[split])
    local = Path(path).expanduser()
    by_name = entry if entry and path == entry.name else None
    if by_name and by_name.folder and not local.exists():
        local = Path(by_name.folder)
    if local.is_file():
        return [file_table(local)] if split == "train" else None
    if local.is_dir():
        return _folder_tables(local, split, names)
    hub = _HUB_ID.fullmatch(by_name.hub if by_name and by_name.hub else path)
    if hub is None or format_of(local) is not None:
        raise FileNotFoundError(_not_found(path, local))
    config = hub["config"] or (entry.config if entry else None)
    data_dir = entry.data_dir if entry else None
    return _dataset_tables(_fetch(hub["name"], config, data_dir, path), path, split, names)


def _not_found(path: str, local: Path) -> str:
    known = ", ".join(entry.name for entry in CATALOG)
    at = f"Names in front of @ are {BY_COLUMNS}, {known}. " if "@" in path else ""
    return (
        f"{path}: no such file or folder ({local.absolute()}), and no Hub id either: one is "
        f"written owner/name or owner/name:config. {at}Built-in data is called {QUICKSTART!r}"
    )


def _folder_tables(folder: Path, split: Split, names: Sequence[str]) -> list[Table] | None:
    """`train.*` and `eval.*` in the folder or its `data/`; or what `save_to_disk` wrote."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        from datasets import load_from_disk

        return _dataset_tables(load_from_disk(folder), str(folder), split, names)
    for name in names:
        for inside in (folder, folder / "data"):
            files = sorted(file for file in inside.glob(f"*{name}*") if _is_split(file, name))
            whole = [file.name for file in files if not _SHARD.search(file.name)]
            if whole and len(files) > 1:
                raise ValueError(
                    f"{inside}: several files claim to be {name}: "
                    f"{', '.join(file.name for file in files)}. Keep one, or name the file itself"
                )
            if files:
                return _shard_tables(files)
    if split == "eval":
        return None
    shards = sorted(folder.glob("data-*-of-*.arrow"))
    if shards:
        return _shard_tables(shards)
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise FileNotFoundError(
        f"{folder}: no {names[0]}.* or data/{names[0]}.* ({', '.join(FORMATS)}, each also .gz but "
        f"Parquet and Arrow). The folder holds: {there}. Name the file itself, or call it "
        f"{names[0]}.*"
    )


def _shard_tables(files: Sequence[Path]) -> list[Table]:
    """The tables of a split; ValueError where not each of its shards is there once."""
    shards = [shard for file in files if (shard := _SHARD.search(file.name))]
    numbers = sorted((int(shard[1]), int(shard[2])) for shard in shards)
    count, first = len(shards), int(bool(shards) and numbers[0][0] == 1)  # some count from 1
    if numbers != [(n, count) for n in range(first, first + count)]:
        raise ValueError(
            f"{files[0].parent}: these are not all shards of one data set, each once: "
            f"{', '.join(file.name for file in files)}. Add those that are missing, or name the "
            "files themselves"
        )
    return [file_table(file) for file in files]


def _is_split(file: Path, name: str) -> bool:
    """`train.jsonl.gz`; a shard as the Hub writes it, `train-00000-of-00002.parquet`; or, of a
    cache of `datasets`, `name-train.arrow`.
    """
    stem, _, suffix = _SHARD.sub("", file.name).partition(".")
    cached = suffix == "arrow" and stem.endswith(f"-{name}")
    known = f".{suffix}".removesuffix(".gz") in FORMATS
    return known and (stem == name or cached)


def _fetch(name: str, config: str | None, data_dir: str | None, path: str) -> "DatasetDict":
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        found = datasets.load_dataset(name, config, data_dir=data_dir)
    # RuntimeError is what `datasets` raises for data sets that come as a script.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise FileNotFoundError(
            f"{path}: no such file or folder, and as a Hub id it could not be fetched: "
            f"{str(error).rstrip('.')}. Check the spelling and the network, or download the data "
            "and give its path"
        ) from error
    assert isinstance(found, datasets.DatasetDict)
    return found


def _dataset_tables(
    found: "Dataset | DatasetDict", path: str, split: Split, names: Sequence[str]
) -> list[Table] | None:
    """The table of a split of what the `datasets` library read."""
    splits = {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    if not isinstance(found, dict):
        splits = {names[0]: found} if split == "train" else {}
    for name in names:
        if name in splits:
            return [dataset_table(splits[name], f"{path} ({name})")]
    if split == "eval":
        return None
    raise ValueError(f"{path}: it has no split `{names[0]}`, only: {', '.join(splits)}")
