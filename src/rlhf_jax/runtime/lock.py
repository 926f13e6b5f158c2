"""One run at a time in a directory: a lock that ends with its process, however that ends."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_FILE = ".rlhf_jax.lock"
"""It stays when the run has ended: who deletes it could delete one that the next run holds."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds `directory` for this process; on a file system without locks that is only said.

    Raises:
        ValueError: a run holds it, of another process or of this one.
    """
    with (directory / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            whose = file.read() or "it has just begun"
            raise ValueError(
                f"a run is writing {directory} ({whose}): wait for it, end it, or choose another "
                "--output-dir"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.info("%s is on a file system without locks: start one run at a time", directory)
        os.register_at_fork(after_in_child=file.close)  # else a child could keep it beyond the run
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}")
        file.flush()
        yield
