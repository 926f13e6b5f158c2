"""Names of mesh axes, and the letters that array names wear.

| letter | dimension | letter | dimension |
|---|---|---|---|
| B | batch (rows) | H | query heads |
| P | prompt positions | G | key/value heads (groups) |
| R | response positions | K | size of one head |
| T | P + R | E | fused query, key and value rows |
| S | cached positions | F | feed-forward width |
| D | model width | V | vocabulary (padded) |
| W | embedding width | N | layers, or any flat count |
| A | rank of an adapter | C | rows that fill slots at once |

A name ends in the letters of its array: `logprobs_BR` is `[batch, response]`.

One mesh serves training and generation. `--mesh=FxT` asks for F devices of fully sharded data
parallelism and T of tensor parallelism; decoding is N-way tensor parallel with N = gen * tp, so
F splits into `data` * `gen`, with `gen` minor in device order.
"""

REPLICA = "replica"
DATA = "data"
GEN = "gen"
TP = "tp"
MESH_AXES = (REPLICA, DATA, GEN, TP)
