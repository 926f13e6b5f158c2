"""Sharded checkpoints over orbax: written in the background, read back on any mesh.

A checkpoint is one folder `<directory>/<step>/` with `state/` (every array under its path in the
tree) and `meta/metadata` (JSON). It appears under its name when it is complete; what a killed run
left half-written is ignored. Arrays are stored whole and unpadded by the mesh, so a run saved on
8x1 continues on 4x2. Keys are paths (`0.params.layers.0.qkv_ED`, where the first 0 is the actor),
not classes: a tree is read back into whatever tree of the same paths one asks for.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from meshes.offload import is_on_host
from rlhf_jax.runtime.disk import WithoutFullDisks, writing
from rlhf_jax.runtime.signals import Stopped, wait_for

_MAX_LISTED = 8
_QUIET = WithoutFullDisks()


class Checkpoints:
    """The checkpoints of one stage in one directory; the newest `keep` stay (None: all).

    With several processes every one makes its own and calls the same methods.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint: use 1 or more, or None")
        self.directory = Path(directory).resolve()
        logging.getLogger("absl").addFilter(_QUIET)  # orbax's, once however often it is added
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, tree: Any, meta: Mapping[str, Any]) -> None:
        """Copy `tree` off the devices and write it, with `meta` as JSON, in the background.

        Returns once the copy is made, so the caller may donate the arrays; where some lie in host
        memory, which would have to hold them twice, once they are written. None leaves are part
        of the tree and need no storage. Saving a step again replaces it.
        """
        self.wait()
        if step in self._manager.all_steps():
            self._manager.delete(step)
        state = ocp.args.StandardSave(_by_path(tree))
        with self._writing():
            saved = self._manager.save(
                step,
                force=True,  # also below a later step, after going back to an earlier checkpoint
                args=ocp.args.Composite(state=state, meta=ocp.args.JsonSave(dict(meta))),
            )
        assert saved, f"orbax skipped step {step}"
        if any(is_on_host(leaf) for leaf in jax.tree.leaves(tree)):
            # Orbax copies nothing that lies on the host, and a GPU donates nothing that is read.
            self.wait()

    def wait(self) -> None:
        """Block until every save is on disk; an error of the background write is raised here."""

        def finish() -> None:
            with suppress(Exception):  # orbax raises it once in each thread: below
                self._manager.wait_until_finished()

        with self._writing():
            wait_for(finish)
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending; the one being written is not among them."""
        return sorted(step for step in self._manager.all_steps() if self._complete(step))

    def latest_step(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the tree of a step; raises as `restore`."""
        self._check_there(step)
        with self._reading(step):
            found = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
        return found["meta"]

    def restore[Tree](self, step: int, abstract_tree: Tree, *, free: bool = False) -> Tree:
        """Read a step into the shapes, dtypes and shardings of `abstract_tree`.

        `abstract_tree` holds `jax.ShapeDtypeStruct` with a sharding, or arrays; these are deleted
        with `free`, so that nothing lies in memory twice. Raises FileNotFoundError without that
        step, ValueError where a leaf differs from what was saved or a file is damaged.
        """
        self._check_there(step)
        wanted = _by_path(abstract_tree)
        with self._reading(step):
            metadata = self._manager.item_metadata(step)["state"]
            if metadata is None:
                raise FileNotFoundError("state/_METADATA is missing")
        _check_equal_trees(wanted, dict(metadata.tree), self.directory / str(step))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        if free:
            jax.tree.map(lambda leaf: leaf.delete(), wanted)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        with self._reading(step):
            state = self._manager.restore(step, args=args)["state"]
        leaves = [state[path] for path in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves)

    def _check_there(self, step: int) -> None:
        """FileNotFoundError without a complete checkpoint of this step."""
        if step not in self.steps():
            raise FileNotFoundError(
                f"no complete checkpoint of step {step} in {self.directory}: "
                f"there are {self.steps() or 'none'}"
            )

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """ValueError where a checkpoint is damaged: which one, why, and how to do without."""
        try:
            yield
        except Exception as error:  # orbax raises bare ones for damaged arrays
            missing = isinstance(error, FileNotFoundError)
            # No room on the devices (JAX's is a RuntimeError) or the host, or a disk that fails.
            if isinstance(error, RuntimeError | MemoryError | OSError) and not missing:
                raise
            before = max((other for other in self.steps() if other != step), default=None)
            there = "begin the stage anew" if before is None else f"go on from step {before}"
            path = self.directory / str(step)
            raise ValueError(
                f"the checkpoint {path} cannot be read: {_cause(error)}. If it is damaged, move it "
                f"away to {there}"
            ) from error

    def _complete(self, step: int) -> bool:
        return all((self.directory / str(step) / item).is_dir() for item in ("state", "meta"))

    def close(self) -> None:
        """Wait, and stop the background threads."""
        self.wait()
        self._manager.close()

    def _writing(self) -> AbstractContextManager[None]:
        """OSError where the disk is full. Older checkpoints go only once a new one is complete."""
        whole = [int(p.name) for p in self.directory.iterdir() if self._is_step(p)]
        kept = f"The last good one is of step {max(whole)}" if whole else "There is none yet"
        return writing("a checkpoint", self.directory, kept)

    def _is_step(self, path: Path) -> bool:
        return path.name.isdigit() and self._complete(int(path.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not (isinstance(error, Stopped) and error.at_once):
            self.close()


def _by_path(tree: Any) -> dict[str, Any]:
    """{path: leaf}: names and list indices joined by dots. None is no leaf in JAX's trees."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the tree have the same path"
    return flat


def _check_equal_trees(wanted: Mapping[str, Any], found: Mapping[str, Any], where: Path) -> None:
    """ValueError that lists the leaves which differ in presence, shape or dtype."""
    problems = [
        f"{path}: wanted {_describe(wanted[path])}, found {_describe(found[path])}"
        for path in wanted
        if path in found and _describe(wanted[path]) != _describe(found[path])
    ]
    problems += [f"{p}: wanted {_describe(wanted[p])}, not saved" for p in wanted if p not in found]
    problems += [f"{p}: found {_describe(found[p])}, not wanted" for p in found if p not in wanted]
    if not problems:
        return
    more = len(problems) - _MAX_LISTED
    listed = "\n  ".join([*problems[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])
    raise ValueError(
        f"the checkpoint {where} does not match this run in {len(problems)} of "
        f"{len(wanted.keys() | found.keys())} arrays:\n  {listed}\n"
        "Resume with the model, optimizer and dtype settings of the run's config.yaml, "
        "or start in a new output directory."
    )


def _cause(error: BaseException) -> str:
    """What went wrong, in a line, without tensorstore's account of all its settings."""
    text = str(error.__cause__ or error) or type(error).__name__
    return text.splitlines()[0].partition(" [tensorstore_spec")[0].rstrip(".")


def _describe(leaf: Any) -> str:
    """`bfloat16[128,64]`"""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
