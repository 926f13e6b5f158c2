"""Sharded checkpoints over orbax: written in the background, read back on any mesh.

A checkpoint is one folder `<directory>/<step>/` with `state/` (every array under its path in the
tree) and `meta/metadata` (JSON). It appears under its name when it is complete; what a killed run
left half-written is ignored. Arrays are stored whole and unpadded by the mesh, so a run saved on
8x1 continues on 4x2. Keys are paths (`0.params.layers.0.qkv_ED`, where the first 0 is the actor),
not classes: a tree is read back into whatever tree of the same paths one asks for.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
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
        with self._writing():
            wait_for(self._manager.wait_until_finished)

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending; the one being written is not among them."""
        return sorted(step for step in self._manager.all_steps() if self._complete(step))

    def latest_step(self) -> int | None:
        """The newest step that can be restored, or None."""
        return max(self.steps(), default=None)

    def restore[Tree](self, step: int, abstract_tree: Tree) -> tuple[Tree, dict[str, Any]]:
        """Read a step into the shapes, dtypes and shardings of `abstract_tree`: (tree, meta).

        `abstract_tree` holds `jax.ShapeDtypeStruct` with a sharding, or arrays. Raises
        FileNotFoundError without that step, ValueError where a leaf differs from what was saved.
        """
        if step not in self.steps():
            raise FileNotFoundError(
                f"no complete checkpoint of step {step} in {self.directory}: "
                f"there are {self.steps() or 'none'}"
            )
        wanted = _by_path(abstract_tree)
        metadata = self._manager.item_metadata(step)["state"]
        assert metadata is not None
        _check_equal_trees(wanted, dict(metadata.tree), self.directory / str(step))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore()
            ),
        )
        state, (_, treedef) = restored["state"], jax.tree.flatten(abstract_tree)
        return jax.tree.unflatten(treedef, [state[path] for path in wanted]), restored["meta"]

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


def _describe(leaf: Any) -> str:
    """`bfloat16[128,64]`"""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
