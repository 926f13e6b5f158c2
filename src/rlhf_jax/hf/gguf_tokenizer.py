"""The tokenizer in a GGUF file's metadata, built as a `tokenizers` tokenizer.

Two kinds are there: byte-level BPE (`gpt2`), whose way of cutting words `tokenizer.ggml.pre`
names, and SentencePiece's BPE (`llama`), whose merges follow from the scores of its pieces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from rlhf_jax.hf.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of `tokenizer.ggml.token_type`."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_words(number: str) -> Any:
    """Llama 3's and Qwen's cut, which differ in how many digits stay together."""
    words = Regex(_WORDS.format(number=number))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _by_gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _by_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _by_gpt2()])


CUTS: Mapping[str, Any] = {
    "gpt-2": _by_gpt2,
    "smollm": _by_digits,
    "llama-bpe": lambda: _by_words(r"\p{N}{1,3}"),
    "llama3": lambda: _by_words(r"\p{N}{1,3}"),
    "qwen2": lambda: _by_words(r"\p{N}"),
}
"""How byte-level BPE cuts text into words, by `tokenizer.ggml.pre`."""

WHOLE_WORDS = ("llama-bpe", "llama3")
"""Where a word that is a token of its own is not put together by merges."""


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer of a file; ValueError where it is of a kind that is not supported."""
    told = _Told(file)
    kind = told.get("model")
    if kind == "gpt2":
        tokenizer = byte_level(told)
    elif kind == "llama":
        tokenizer = sentencepiece(told)
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported: supported are 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece BPE)"
        )
    tokenizer.add_special_tokens([plain(text) for text in told.texts(CONTROL, UNKNOWN)])
    tokenizer.add_tokens([plain(text, special=False) for text in told.texts(USER_DEFINED)])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    specials = {f"{name}_token": told.special(key) for name, key in names.items()}
    # llama.cpp's defaults: converters of 2024 leave the key out of Llama 3's files.
    add_bos = told.get("add_bos_token", kind == "llama" or told.get("pre") in WHOLE_WORDS)
    if add_bos and specials["bos_token"] is not None:
        tokenizer.post_processor = in_front(specials["bos_token"], told.get("bos_token_id"))  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.need("context_length")),
        **{name: text for name, text in specials.items() if text is not None},
    )


class _Told:
    """What a file says of its tokenizer."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens: list[str] = self.get("tokens") or []
        if not self.tokens:
            raise ValueError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens)")
        self.types: Sequence[int] = self.get("token_type") or [NORMAL] * len(self.tokens)

    def get(self, key: str, default: Any = None) -> Any:
        """`tokenizer.ggml.<key>`."""
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def texts(self, *kinds: int) -> list[str]:
        """The tokens of some types."""
        return [text for text, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def special(self, key: str) -> str | None:
        """The token that has a role."""
        index = self.get(f"{key}_token_id")
        return None if index is None else self.tokens[index]

    @property
    def vocab(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.tokens)}


def plain(text: str, *, special: bool = True) -> AddedToken:
    """A token that is found in text as it stands."""
    return AddedToken(text, special=special, normalized=False)


def byte_level(told: _Told) -> Tokenizer:
    """Byte-level BPE."""
    cut = told.get("pre", "default")
    if cut not in CUTS:
        raise ValueError(
            f"{told.file.path}: tokenizer.ggml.pre={cut!r} is not supported: it says how text is "
            f"cut into words, supported are {', '.join(CUTS)}"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in told.get("merges") or ()]
    whole = cut in WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocab=told.vocab, merges=pairs, ignore_merges=whole))  # pyright: ignore
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore
    tokenizer.pre_tokenizer = CUTS[cut]()
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    return tokenizer


def sentencepiece(told: _Told) -> Tokenizer:
    """SentencePiece's BPE: the best-scored piece is merged first, bytes stand for the rest."""
    scores = told.get("scores")
    if not scores:
        raise ValueError(f"{told.file.path} has no tokenizer.ggml.scores: its merges are not known")
    unknown = told.special("unknown") or "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=told.vocab,
            merges=merges_by_score(told, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if told.get("add_space_prefix", True):
        spaces = [normalizers.Prepend("▁"), *spaces]
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)  # pyright: ignore
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_by_score(told: _Told, scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to put a piece together of two others, best piece first."""
    vocab = told.vocab
    mergeable = [
        (-score, index, text)
        for index, (text, kind, score) in enumerate(
            zip(told.tokens, told.types, scores, strict=True)
        )
        if kind in (NORMAL, USER_DEFINED) and len(text) > 1
    ]
    return [
        pair
        for _, _, text in sorted(mergeable)
        for pair in sorted(
            ((text[:n], text[n:]) for n in range(1, len(text))),
            key=lambda pair: (vocab.get(pair[0], 0), vocab.get(pair[1], 0)),
        )
        if pair[0] in vocab and pair[1] in vocab
    ]


def in_front(token: str, index: int) -> Any:
    """A post-processor that begins every text with a token."""
    return processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, index)],
    )  # fmt: skip
