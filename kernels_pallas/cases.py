"""Named shapes shared by the tests (small) and the benchmark (real models).

Dims: B batch, T tokens, S cached positions, H query heads, G key/value heads, K head size,
N tokens in a flat list, D width, V vocabulary, M rows of a decode step, F outputs or inputs.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionCase:
    """Causal attention of T tokens to themselves; inside each of `segments`, where there are some.

    Those are the lengths of what is packed into every row; what they leave of it is one more.
    """

    name: str
    batch: int
    length: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    segments: tuple[int, ...] = ()

    def starts(self) -> list[int] | None:
        """Index of the first token of each token's segment; None without segments."""
        if not self.segments:
            return None
        lengths = [*self.segments, self.length - sum(self.segments)]
        firsts = [sum(lengths[:n]) for n in range(len(lengths))]
        return [first for first, n in zip(firsts, lengths, strict=True) for _ in range(n)]


@dataclass(frozen=True)
class DecodeCase:
    """One new token in each row against a cache of S positions; rows are at `positions`.

    Empty `positions` stands for rows spread over the second half of the cache. With `rope` heads
    are rotated first; `form` is the dtype of caches with one byte a number.
    """

    name: str
    batch: int
    cached: int
    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    positions: tuple[int, ...] = ()
    rope: bool = False
    form: str | None = None

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


@dataclass(frozen=True)
class UpCase:
    """M rows times `[F, D]`, with what a model adds in the same kernel."""

    name: str
    rows: int
    outputs: int
    width: int
    bias: bool = True
    gated: bool = False
    activation: str | None = None


@dataclass(frozen=True)
class DownCase:
    """M rows times `[F, D]` as parts, and the residual sum and norm behind it."""

    name: str
    rows: int
    inputs: int
    width: int
    layer_norm: bool = True
    bias: bool = True


@dataclass(frozen=True)
class SamplingCase:
    """A token for each of B rows of V logits, normal with deviation `scale`."""

    name: str
    batch: int
    vocab: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class HalfLayerCase:
    """Half a layer of a decode step, without attention: M rows of width D times `[outputs, D]`,
    their first columns times `[inputs, D]`, residual sum and norm. `form` is the dtype of matrices
    with one byte a number.
    """

    name: str
    rows: int
    width: int
    outputs: int
    inputs: int
    activation: str | None = None
    gated: bool = False
    layer_norm: bool = True
    form: str | None = None


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
    AttentionCase("mha_k96", 1, 18, 2, 2, 96),
    AttentionCase("gqa2_k256", 1, 20, 2, 1, 256),
    AttentionCase("packed_gqa2_k64", 2, 37, 4, 2, 64, segments=(9, 1, 20)),
    AttentionCase("packed_whole_k80", 1, 33, 2, 2, 80, segments=(16, 17)),
    AttentionCase("packed_window4_k8", 1, 40, 2, 1, 8, window=4, segments=(3, 30)),
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
    DecodeCase("rope_mha_k8", 2, 40, 2, 2, 8, positions=(0, 33), rope=True),
    DecodeCase("rope_gqa3_k80", 2, 45, 6, 2, 80, positions=(44, -1), rope=True),
    DecodeCase("rope_window20_gqa4_k96", 2, 70, 4, 1, 96, 20, positions=(69, 1), rope=True),
    DecodeCase("rope_gqa2_k256", 2, 40, 2, 1, 256, positions=(39, 17), rope=True),
)

TOKEN_LOGPROB_TESTS = (
    TokenLogprobCase("one_chunk", 6, 16, 32, 32, 8),
    TokenLogprobCase("many_chunks_padded_vocab", 25, 16, 48, 37, 8),
    TokenLogprobCase("chunk_divides", 24, 8, 40, 33, 6),
    TokenLogprobCase("temperature", 10, 8, 24, 20, 4, temperature=0.7),
)

UP_TESTS = (
    UpCase("one_row", 1, 64, 48),
    UpCase("full_tensor_core_rows", 16, 96, 64, activation="relu"),
    UpCase("padded_rows", 5, 48, 32),
    UpCase("gated", 3, 64, 96, bias=False, gated=True),
    UpCase("gated_bias", 20, 32, 32, gated=True),
    UpCase("no_bias", 2, 32, 16, bias=False),
)

DOWN_TESTS = (
    DownCase("one_row", 1, 64, 48),
    DownCase("several_parts", 5, 512, 32),
    DownCase("rms_norm", 16, 256, 64, layer_norm=False, bias=False),
    DownCase("rms_norm_bias", 3, 48, 80, layer_norm=False),
    DownCase("layer_norm_no_bias_odd", 13, 64, 144, bias=False),
)

SAMPLING_TESTS = (
    SamplingCase("top_k", 12, 300, top_k=5),
    SamplingCase("top_k_1", 12, 40, top_k=1),
    SamplingCase("top_k_beyond_the_vocabulary", 12, 64, top_k=100, top_p=0.9),
    SamplingCase("top_p_ragged", 12, 777, top_p=0.7),
    SamplingCase("top_p_of_almost_equal_logits", 12, 300, top_p=0.3, scale=0.01),
    SamplingCase("min_p", 12, 300, min_p=0.05),
    SamplingCase("top_p_of_top_k", 24, 300, top_k=20, top_p=0.8),
    SamplingCase("all_three", 24, 300, top_k=60, top_p=0.95, min_p=0.02, scale=3.0),
)

ATTENTION_BENCHMARKS = (
    AttentionCase("opt-1.3b_B32_T512", 32, 512, 32, 32, 64),
    AttentionCase("opt-2.7b_B16_T512", 16, 512, 32, 32, 80),
    AttentionCase("opt-6.7b_B16_T512", 16, 512, 32, 32, 128),
    AttentionCase("llama-3-8b_B8_T1024", 8, 1024, 32, 8, 128),
    AttentionCase("mistral_window_B4_T2048", 4, 2048, 32, 8, 128, window=1024),
    AttentionCase("packed_opt-1.3b_B32_T512", 32, 512, 32, 32, 64, segments=(200, 150, 130)),
    AttentionCase("packed_llama-3-8b_B8_T2048", 8, 2048, 32, 8, 128, segments=(700, 500, 400, 300)),
)

DECODE_BENCHMARKS = (
    DecodeCase("opt-1.3b_B1_S512", 1, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B8_S512", 8, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B64_S512", 64, 512, 32, 32, 64),
    DecodeCase("opt-1.3b_B256_S512", 256, 512, 32, 32, 64),
    DecodeCase("opt-2.7b_B64_S512", 64, 512, 32, 32, 80),
    DecodeCase("opt-6.7b_B64_S512", 64, 512, 32, 32, 128),
    DecodeCase("opt-6.7b_B64_S512_int8", 64, 512, 32, 32, 128, form="int8"),
    DecodeCase("opt-6.7b_B64_S512_fp8", 64, 512, 32, 32, 128, form="float8_e4m3fn"),
    DecodeCase("qwen-2-heads-per-group_B64_S512", 64, 512, 16, 8, 128, rope=True),
    DecodeCase("smollm2-135m_B256_S512", 256, 512, 9, 3, 64, rope=True),
    DecodeCase("llama-3-8b_B8_S1024", 8, 1024, 32, 8, 128, rope=True),
    DecodeCase("llama-3-8b_B64_S1024", 64, 1024, 32, 8, 128, rope=True),
    DecodeCase("llama-3-8b_B64_S1024_int8", 64, 1024, 32, 8, 128, rope=True, form="int8"),
    DecodeCase("llama-3-70b_tp8_B64_S1024", 64, 1024, 8, 1, 128, rope=True),
    DecodeCase("mistral_window_B64_S2048", 64, 2048, 32, 8, 128, window=512, rope=True),
)

TOKEN_LOGPROB_BENCHMARKS = (
    TokenLogprobCase("opt-1.3b_N8192", 8192, 2048, 50304, 50272, 2048),
    TokenLogprobCase("opt-1.3b_N8192_chunk1024", 8192, 2048, 50304, 50272, 1024),
    TokenLogprobCase("llama-3-8b_N4096", 4096, 4096, 128256, 128256, 1024),
)

HALF_LAYER_TESTS = (
    HalfLayerCase("relu", 3, 32, 64, 64, activation="relu"),
    HalfLayerCase("gated_rms_norm", 2, 32, 48, 48, gated=True, layer_norm=False),
    HalfLayerCase("queries_of_a_projection", 2, 32, 96, 32),
    HalfLayerCase("relu_int8", 3, 32, 64, 64, activation="relu", form="int8"),
    HalfLayerCase("gated_int8", 2, 32, 48, 48, gated=True, layer_norm=False, form="int8"),
    HalfLayerCase("relu_fp8", 3, 32, 64, 64, activation="relu", form="float8_e4m3fn"),
)

HALF_LAYER_BENCHMARKS = tuple(
    replace(case, name=f"{case.name}{end}_M{rows}", rows=rows, form=form)
    for case in (
        HalfLayerCase("opt-1.3b_mlp", 0, 2048, 8192, 8192, activation="relu"),
        HalfLayerCase("opt-1.3b_attention", 0, 2048, 6144, 2048),
        HalfLayerCase("opt-6.7b_mlp", 0, 4096, 16384, 16384, activation="relu"),
        HalfLayerCase("opt-6.7b_attention", 0, 4096, 12288, 4096),
        HalfLayerCase("llama-3-8b_mlp", 0, 4096, 14336, 14336, gated=True, layer_norm=False),
    )
    for form, end in ((None, ""), ("int8", "_int8"))
    for rows in (1, 8, 64)
)

SAMPLING_BENCHMARKS = (
    SamplingCase("temperature_B64_V50304", 64, 50304),
    SamplingCase("B64_k50_V50304", 64, 50304, top_k=50),
    SamplingCase("B64_p0.9_V50304", 64, 50304, top_p=0.9),
    SamplingCase("B64_k1000_p0.95_V50304", 64, 50304, top_k=1000, top_p=0.95),
    SamplingCase("B64_k50_p0.9_V50304", 64, 50304, top_k=50, top_p=0.9),
    SamplingCase("B64_min_p0.05_V50304", 64, 50304, min_p=0.05),
    SamplingCase("B256_k50_p0.9_V50304", 256, 50304, top_k=50, top_p=0.9),
    SamplingCase("B64_k50_p0.9_V128256", 64, 128256, top_k=50, top_p=0.9),
    SamplingCase("B64_k10000_p0.9_V50304", 64, 50304, top_k=10000, top_p=0.9),
    SamplingCase("B64_k50_p0.9_min_p0.05_V50304", 64, 50304, top_k=50, top_p=0.9, min_p=0.05),
)
