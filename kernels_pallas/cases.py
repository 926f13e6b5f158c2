"""Named shapes shared by the tests (small) and the benchmark (real models).

Dims: B batch, T tokens, S cached positions, H query heads, G key/value heads, K head size,
N tokens in a flat list, D width, V vocabulary.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention of T tokens to themselves."""

    name: str
    batch: int
    length: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None = None


@dataclass(frozen=True)
class DecodeCase:
    """One new token in each row against a cache of S positions; rows are at `positions`.

    Empty `positions` stands for rows spread over the second half of the cache.
    """

    name: str
    batch: int
    cached: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    positions: tuple[int, ...] = ()

    def row_positions(self) -> tuple[int, ...]:
        """Position of each row's new token."""
        if self.positions:
            return self.positions
        half = self.cached // 2
        return tuple(half + (row * half) // self.batch for row in range(self.batch))


@dataclass(frozen=True)
class TokenLogprobCase:
    """N tokens; columns of the vocabulary from `valid_vocab` on are padding."""

    name: str
    tokens: int
    width: int
    vocab: int
    valid_vocab: int
    chunk: int
    temperature: float = 1.0


ATTENTION_TESTS = (
    AttentionCase("mha_k8", 2, 12, 4, 4, 8),
    AttentionCase("mha_k64", 2, 16, 2, 2, 64),
    AttentionCase("mha_k80_odd", 1, 17, 2, 2, 80),
    AttentionCase("gqa2_k64", 2, 10, 4, 2, 64),
    AttentionCase("gqa4_k128", 1, 9, 8, 2, 128),
    AttentionCase("gqa8_k8", 1, 14, 8, 1, 8),
    AttentionCase("window5_k8", 2, 20, 4, 2, 8, window=5),
    AttentionCase("window1_k64", 1, 6, 2, 2, 64, window=1),
    AttentionCase("window_wider_than_rows", 1, 6, 2, 1, 8, window=50),
)

DECODE_TESTS = (
    DecodeCase("mha_k8", 3, 40, 2, 2, 8, positions=(0, 17, 39)),
    DecodeCase("mha_k64", 2, 64, 2, 2, 64, positions=(31, 32)),
    DecodeCase("mha_k80_ragged_cache", 2, 45, 2, 2, 80, positions=(44, 33)),
    DecodeCase("gqa2_k64", 2, 96, 4, 2, 64, positions=(64, 95)),
    DecodeCase("gqa3_k8", 2, 50, 6, 2, 8, positions=(49, 3)),
    DecodeCase("gqa4_k128", 2, 70, 8, 2, 128, positions=(69, 1)),
    DecodeCase("gqa8_k80", 2, 70, 8, 1, 80, positions=(66, 12)),
    DecodeCase("window16_k64", 3, 128, 2, 2, 64, window=16, positions=(127, 9, 64)),
    DecodeCase("window40_gqa4_k8", 2, 128, 4, 1, 8, window=40, positions=(120, 39)),
    DecodeCase("window1_k8", 2, 64, 2, 2, 8, window=1, positions=(32, 63)),
    DecodeCase("inactive_rows", 4, 40, 4, 2, 8, positions=(-1, 5, 40, 1000)),
)

TOKEN_LOGPROB_TESTS = (
    TokenLogprobCase("one_chunk", 6, 16, 32, 32, 8),
    TokenLogprobCase("many_chunks_padded_vocab", 25, 16, 48, 37, 8),
    TokenLogprobCase("chunk_divides", 24, 8, 40, 33, 6),
    TokenLogprobCase("temperature", 10, 8, 24, 20, 4, temperature=0.7),
)

ATTENTION_BENCHMARKS = (
    AttentionCase("opt-1.3b_B32_T512", 32, 512, 32, 32, 64),
    AttentionCase("opt-2.7b_B16_T512", 16, 512, 32, 32, 80),
    AttentionCase("opt-6.7b_B16_T512", 16, 512, 32, 32, 128),
    AttentionCase("llama-3-8b_B8_T1024", 8, 1024, 32, 8, 128),
    AttentionCase("mistral_window_B4_T2048", 4, 2048, 32, 8, 128, window=1024),
)

DECODE_BENCHMARKS = (
    DecodeCase("opt-1.3b_B1_S512", 1, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B8_S512", 8, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B64_S512", 64, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B256_S512", 256, 512, 32, 32, 64),
    DecodeCase("opt-2.7b_B64_S512", 64, 512, 32, 32, 80),
    DecodeCase("opt-6.7b_B64_S512", 64, 512, 32, 32, 128),
    DecodeCase("qwen-2-heads-per-group_B64_S512", 64, 512, 16, 8, 128),
    DecodeCase("llama-3-8b_B8_S1024", 8, 1024, 32, 8, 128),
    DecodeCase("llama-3-8b_B64_S1024", 64, 1024, 32, 8, 128),
    DecodeCase("llama-3-70b_tp8_B64_S1024", 64, 1024, 8, 1, 128),
    DecodeCase("mistral_window_B64_S2048", 64, 2048, 32, 8, 128, window=512),
)

TOKEN_LOGPROB_BENCHMARKS = (
    TokenLogprobCase("opt-1.3b_N8192", 8192, 2048, 50304, 50272, 2048),
    TokenLogprobCase("opt-1.3b_N8192_chunk1024", 8192, 2048, 50304, 50272, 1024),
    TokenLogprobCase("llama-3-8b_N4096", 4096, 4096, 128256, 128256, 1024),
)
