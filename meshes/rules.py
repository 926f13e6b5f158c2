"""Three tables that map logical axes to mesh axes: where each dimension of an array lives.

| table | used for | weights |
|---|---|---|
| STORE | parameters, optimizer state, gradients | fully sharded over tp, gen and data |
| COMPUTE | inside one layer of the train step | tensor parallel over tp, gathered over the rest |
| GENERATE | prefill and decode | tensor parallel over tp and gen, resident |

Every weight has its tensor-parallel dimension first, and STORE shards that same dimension with the
tensor-parallel axes major. Going from STORE to GENERATE is then an all-gather over `data` alone,
and no operation at all where `data` has size 1. One factor of an adapter has no such dimension: it
is whole where it is used, and STORE shards its width.
"""

from dataclasses import dataclass
from typing import Literal

from meshes.axes import DATA, GEN, REPLICA, TP

TableName = Literal["store", "compute", "generate"]


@dataclass(frozen=True)
class Rules:
    """Mesh axes of the tensor-parallel dimension of weights and activations, of the batch, and of
    the width of weights that no device computes a part of. "rows" is a batch over all of these
    axes: for work on whole rows, which tensor parallelism would repeat on every device.
    """

    tensor: tuple[str, ...]
    batch: tuple[str, ...]
    width: tuple[str, ...] = ()

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes of a logical axis."""
        rows = self.batch + tuple(axis for axis in self.tensor if axis not in self.batch)
        named = {"batch": self.batch, "rows": rows, "width": self.width}
        return named.get(logical, self.tensor)


STORE = Rules(tensor=(TP, GEN, DATA), batch=(REPLICA, DATA, GEN), width=(TP, GEN, DATA))
COMPUTE = Rules(tensor=(TP,), batch=(REPLICA, DATA, GEN))
GENERATE = Rules(tensor=(TP, GEN), batch=(REPLICA, DATA))

TABLES: dict[TableName, Rules] = {"store": STORE, "compute": COMPUTE, "generate": GENERATE}
