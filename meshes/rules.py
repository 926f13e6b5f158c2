"""Three tables that map logical axes to mesh axes: where each dimension of an array lives.

| table | used for | weights |
|---|---|---|
| STORE | parameters, optimizer state, gradients | fully sharded over tp, gen and data |
| COMPUTE | inside one layer of the train step | tensor parallel over tp, gathered over the rest |
| GENERATE | prefill and decode | tensor parallel over tp and gen, resident |

Every weight has its tensor-parallel dimension first, and STORE shards that same dimension with the
tensor-parallel axes major. Going from STORE to GENERATE is then an all-gather over `data` alone,
and no operation at all where `data` has size 1.
"""

from dataclasses import dataclass
from typing import Literal

from meshes.axes import DATA, GEN, REPLICA, TP

TableName = Literal["store", "compute", "generate"]


@dataclass(frozen=True)
class Rules:
    """Mesh axes of the tensor-parallel dimension of weights and activations, and of the batch."""

    tensor: tuple[str, ...]
    batch: tuple[str, ...]


STORE = Rules(tensor=(TP, GEN, DATA), batch=(REPLICA, DATA, GEN))
COMPUTE = Rules(tensor=(TP,), batch=(REPLICA, DATA, GEN))
GENERATE = Rules(tensor=(TP, GEN), batch=(REPLICA, DATA))

TABLES: dict[TableName, Rules] = {"store": STORE, "compute": COMPUTE, "generate": GENERATE}
