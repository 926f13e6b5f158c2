"""A full disk: the message says what happened, and what was whole before is whole after."""

import errno
import gc
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.hf.export import staged
from rlhf_jax.runtime.checkpoint import Checkpoints
from rlhf_jax.runtime.disk import replace_text, writing
from rlhf_jax.runtime.metrics import MetricsWriter, read_rows

FULL = "is full .* MB free.*--resume"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, where the system lets us mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if not done or done.returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device"),
        RuntimeError("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_whoever_says_it(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=rf"{tmp_path} {FULL}") as caught,
        writing("a.txt", tmp_path, "b.txt stays"),
    ):
        raise error
    assert "a.txt could not be written. b.txt stays. Free some space" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_behind_another_error_is_found(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=FULL), writing("a.txt", tmp_path):
        raise RuntimeError("save failed") from OSError(errno.ENOSPC, "")


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^wrong$"), writing("a.txt", tmp_path):
        raise ValueError("wrong")


def test_the_old_text_stays_until_the_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary.json"
    replace_text(file, "old")
    write = Path.write_text

    def half(self: Path, text: str, **kwargs: str) -> int:
        write(self, text[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match=FULL):
        replace_text(file, "new text")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_what_the_run_does_not_need_asks_for_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str, **kwargs: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="report.html could not be written. Free some space$"):
        replace_text(tmp_path / "report.html", "text", advice="Free some space")


def test_an_export_on_a_full_disk_leaves_the_earlier_one(tmp_path: Path) -> None:
    export = tmp_path / "actor"
    with staged(export) as stage:
        assert stage is not None
        (stage / "config.json").write_text("first")

    def again() -> None:
        with staged(export) as stage:
            assert stage is not None
            (stage / "config.json").write_text("sec")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=f"actor/ could not be written. What {export} held stays"):
        again()
    assert (export / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]


# Writes that orbax gives up complain to an event loop that it has closed, when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("keep", [1, None])
def test_the_last_good_checkpoint_survives_a_disk_that_fills_up(
    small_disk: Path, keep: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes 1 MB of random numbers, beside what else lies there. The line of the error is all
    that is said of it: no traceback of orbax.
    """
    tree = {"w_ED": jax.random.normal(jax.random.key(0), (500, 500)), "step": jnp.int32(3)}
    (small_disk / "other").write_bytes(os.urandom(1_400_000))
    directory = small_disk / "checkpoints"

    def fill_up() -> None:
        with Checkpoints(directory, keep) as written:
            for step in (1, 2, 3):
                written.save(step, tree, {"step": step})
                written.wait()

    with pytest.raises(OSError, match=FULL) as caught:
        fill_up()
    assert "The last good one is of step 1." in str(caught.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (small_disk / "other").unlink()
    with Checkpoints(directory, keep) as found:
        assert found.latest_step() == 1
        restored = found.restore(1, tree)
        assert found.meta(1) == {"step": 1}
        assert (restored["w_ED"] == tree["w_ED"]).all()
        found.save(2, tree, {"step": 2})
        found.wait()
        assert found.latest_step() == 2
    del caught
    gc.collect()


def test_rows_on_a_full_disk_stay_whole(small_disk: Path) -> None:
    writer = MetricsWriter(small_disk / "metrics.jsonl")
    writer.write("sft", 1, {"loss": 1.0})
    (small_disk / "other").write_bytes(b"0" * 2_000_000)
    row = {f"metric {n} {'x' * 200}": 1.0 for n in range(6000)}
    with pytest.raises(OSError, match="metrics.jsonl could not be written"):
        writer.write("sft", 2, row)
    (small_disk / "other").unlink()
    writer.write("sft", 3, {"loss": 0.5})
    assert [row["step"] for row in read_rows(writer.path)] == [1, 3]
    assert all(json.loads(line) for line in writer.path.read_text().splitlines())
