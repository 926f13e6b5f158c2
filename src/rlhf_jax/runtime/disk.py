"""Writing to a disk that may be full: what was there stays whole, and the error says so."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
SAID = tuple(os.strerror(code) for code in FULL)
RESUME = "Free some space, then go on with --resume"


@contextmanager
def writing(what: str, place: Path, kept: str = "", advice: str = RESUME) -> Iterator[None]:
    """OSError in a line where the disk of `place` is full: what was written, what is `kept`."""
    try:
        yield
    except Exception as error:  # tensorstore and tokenizers have no OSError for it
        if not is_full(error):
            raise
        raise OSError(
            f"the disk of {place} is full ({free_megabytes(place):.0f} MB free): {what} could not "
            f"be written. {kept}{'. ' if kept else ''}{advice}"
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a lack of space."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    if any(words in str(error) for words in SAID):
        return True
    return error.__cause__ is not None and is_full(error.__cause__)


class WithoutFullDisks(logging.Filter):
    """Drops log records, with tracebacks of pages, of an error that `writing` tells in a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or not is_full(error)


def free_megabytes(place: Path) -> float:
    """Free space where `place` is, or is going to be."""
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free / 1e6


def replace_text(path: Path, text: str, advice: str = RESUME) -> None:
    """A file's new content, all of it or none: the old one stays until the new one is written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path.name, path.parent, advice=advice):
            partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
