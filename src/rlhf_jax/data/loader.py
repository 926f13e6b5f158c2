"""Batches by step number: the order is a function of (seed, epoch), so its state is one integer."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, SupportsIndex

import numpy as np

from rlhf_jax.data.fingerprint import fingerprint
from rlhf_jax.data.mixture import Mixture
from rlhf_jax.data.packing import Packing


class Loader[Batch]:
    """Random access to the global batches of endless, reshuffled epochs.

    Step s is batch `s % num_batches` of epoch `s // num_batches`; an epoch visits every row once
    (in a weighted blend: the rows that `Mixture` says) in an order drawn from `(seed, epoch)`. The
    last batch of an epoch may have too few rows; it is filled up with rows of valid 0. To resume,
    go on with `batches(step, …)`: neither the number of processes nor what was read before matters.
    """

    def __init__[Row](
        self,
        rows: Sequence[Row],
        collate: Callable[[Sequence[Any], int], Batch],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        group_of: Callable[[Row], int] | None = None,
        mixture: Mixture | None = None,
        packing: Packing | None = None,
    ):
        """Set up; nothing is read yet.

        Args:
            rows: the data set, tokenised.
            collate: (at most `batch_size` rows, batch_size) to a batch, from `data.batches`.
            batch_size: rows in a global batch.
            seed: of the order.
            shuffle: False keeps the order of `rows`, the same in every epoch.
            group_of: rows of equal value share batches (a batch mixes two values only where one
                group ends and the next begins); the order of the batches is shuffled then.
            mixture: how often the rows of each source are seen; None: each once an epoch.
            packing: a batch is `batch_size` sequences of rows, packed anew every epoch, and what
                `collate` gets are sequences of rows.
        """
        if not len(rows):
            raise ValueError("the loader has no rows: give a data set with at least one")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1")
        if group_of is not None and not shuffle:
            raise ValueError("group_of reorders rows: it needs shuffle=True")
        if mixture is not None and not shuffle:
            raise ValueError("a mixture draws rows: it needs shuffle=True")
        if packing is not None and (mixture is not None or group_of is not None):
            raise ValueError("packing needs epochs of the same rows, in an order of its own")
        self.batch_size = batch_size
        self.num_rows = len(rows)
        self._rows = rows
        num_items = len(rows) if packing is None else packing.num_sequences
        self.num_batches = -(-num_items // batch_size)
        self._packing = packing
        self._seed = seed
        self._shuffle = shuffle
        self._mixture = mixture
        self._groups = None if group_of is None else np.array([group_of(row) for row in rows])
        if packing is None:
            self._collate = lambda indices: collate([rows[i] for i in indices], batch_size)
        else:
            self._collate = lambda sequences: collate(
                [[rows[i] for i in sequence] for sequence in sequences], batch_size
            )
        # Prefetching threads ask for batches of at most two epochs at a time.
        self._epoch = lru_cache(maxsize=2)(self._order_epoch)

    @cached_property
    def fingerprint(self) -> str:
        """Of the rows: see `data.fingerprint`."""
        return fingerprint(self._rows)

    def batch(self, step: int) -> Batch:
        """The batch of `step` >= 0."""
        return self._collate(self._items(step))

    def size(self, step: int) -> int:
        """How many rows (with packing: sequences) the batch of `step` has before it is filled."""
        return len(self._items(step))

    def batches(self, start: int, stop: int, *, prefetch: int = 4) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for steps start … stop-1, up to `prefetch` of them made ahead.

        An exception while a batch is made is raised here, when that batch is due.
        """
        import grain

        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: it must be at least 1")
        options = grain.ReadOptions(num_threads=min(prefetch, 2), prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.source(_Steps(self, range(start, stop)))
        yield from steps.to_iter_dataset(options)

    def _items(self, step: int) -> Any:
        """The row numbers of a batch."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        epoch, place = divmod(step, self.num_batches)
        return self._epoch(epoch)[place]

    def _order_epoch(self, epoch: int) -> list[Any]:
        """Row numbers of every batch of an epoch; with packing, of every sequence of it."""
        order = np.arange(self.num_rows)
        if not self._shuffle:
            return self._cut(order if self._packing is None else self._packing.pack(order))
        rng = np.random.default_rng((self._seed, epoch))
        drawn = order if self._mixture is None else self._mixture.order(epoch, self._seed)
        order = rng.permutation(drawn)
        if self._packing is not None:
            sequences = self._packing.pack(order)
            return self._cut([sequences[n] for n in rng.permutation(len(sequences))])
        if self._groups is None:
            return self._cut(order)
        batches = self._cut(order[np.argsort(self._groups[order], kind="stable")])
        return [batches[n] for n in rng.permutation(len(batches))]

    def _cut(self, order: Any) -> list[Any]:
        return [order[n : n + self.batch_size] for n in range(0, len(order), self.batch_size)]


class _Steps[Batch]:
    """A grain data source: a range of a loader's steps."""

    def __init__(self, loader: Loader[Batch], steps: range):
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: SupportsIndex) -> tuple[int, Batch]:
        step = self._steps[index]
        return step, self._loader.batch(step)

    def __repr__(self) -> str:
        # grain writes a source into its own messages; a data set does not belong there.
        return f"steps {self._steps.start} to {self._steps.stop}"
