"""The switches of the one decoder that serves OPT and the Llama family."""

import math
from dataclasses import dataclass
from typing import Literal

PADDING_MULTIPLE = 128


def pad_up(size: int, multiple: int = PADDING_MULTIPLE) -> int:
    """The next multiple: vocabulary and feed-forward width are padded whatever the mesh."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are the true ones; padded sizes are properties."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    max_positions: int
    positions: Literal["learned", "rope"]
    norm: Literal["layer_norm", "rms_norm"]
    activation: Literal["relu", "gelu", "silu_gated"]
    embed_width: int
    norm_eps: float = 1e-5
    pre_norm: bool = True
    final_norm: bool = True
    attention_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    tie_embeddings: bool = True
    position_offset: int = 0
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    init_std: float = 0.02
    sinusoid_init: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads: "
                "num_heads must be a multiple of num_kv_heads"
            )
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.head_size}")

    @property
    def padded_vocab(self) -> int:
        return pad_up(self.vocab_size)

    @property
    def padded_mlp(self) -> int:
        return pad_up(self.mlp_width)

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: per KV group its query heads, its key, its value."""
        return self.num_kv_heads * (self.heads_per_group + 2) * self.head_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, int):
            return (self.eos_token_id,)
        return self.eos_token_id

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table (OPT keeps two unused rows in front)."""
        return self.max_positions + self.position_offset

    def shard_units(self) -> dict[str, int]:
        """Indivisible pieces per logical axis in tensor-parallel layouts: heads are never cut."""
        return {
            "vocab": self.padded_vocab,
            "mlp": self.padded_mlp,
            "qkv": self.num_kv_heads,
            "heads": self.num_kv_heads,
            "width": self.width,
        }

    def store_units(self) -> dict[str, int]:
        """Pieces per logical axis in STORE: any row may be the boundary of a shard."""
        return {
            "vocab": self.padded_vocab,
            "mlp": self.padded_mlp,
            "qkv": self.qkv_rows,
            "heads": self.num_heads * self.head_size,
            "width": self.width,
        }

    def num_params(self) -> int:
        """Parameters at their true sizes (embedding and position tables counted once)."""
        attention = (self.qkv_rows + self.num_heads * self.head_size) * self.width
        if self.attention_bias:
            attention += self.qkv_rows
        if self.output_bias:
            attention += self.width
        matrices = 3 if self.activation == "silu_gated" else 2
        mlp = matrices * self.mlp_width * self.width
        if self.mlp_bias:
            mlp += self.mlp_width + self.width
        norm = self.width * (2 if self.norm == "layer_norm" else 1)
        total = self.num_layers * (attention + mlp + 2 * norm)
        total += self.vocab_size * self.embed_width * (1 if self.tie_embeddings else 2)
        if self.embed_width != self.width:
            total += 2 * self.width * self.embed_width
        if self.positions == "learned":
            total += self.position_rows * self.width
        return total + (norm if self.final_norm else 0)

    def default_init_scale(self) -> float:
        """Factor on the output projections: the residual stream keeps its size with depth."""
        return 1.0 / math.sqrt(2 * self.num_layers)
