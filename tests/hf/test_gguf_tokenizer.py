"""Tokenizers built from GGUF metadata encode as the tokenizers they were made from."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rlhf_jax.hf.gguf import open_gguf
from rlhf_jax.hf.gguf_tokenizer import CUTS, gguf_tokenizer
from rlhf_jax.hf.tokenizer import load_tokenizer
from tests.hf.gguf_files import write
from tests.hf.test_gguf import smollm2

TEXTS = [
    "Hello, world! It's 2024; we've 1,234.5 reasons.",
    "  leading spaces,\n\nline breaks\t tabs   and   runs\r\n",
    "naïve café — Привет 你好 🙂 ﬁ",
    "def f(x):\n    return x**2  # don't",
    "",
]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def file_of(path: Path, **tokenizer: Any) -> Path:
    """A GGUF file with nothing but a tokenizer."""
    values = {"context_length": 128} | {
        name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}": value
        for name, value in tokenizer.items()
    }
    return write(path / "tokenizer.gguf", "llama", values, {})


def test_gpt2s_cut(shared_data, tmp_path: Path) -> None:
    """OPT's vocabulary and merges."""
    folder = shared_data("opt-tokenizer")
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [3 if token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") else 1 for token in tokens]
    file = file_of(
        tmp_path, model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=merges,
        bos_token_id=2, eos_token_id=2, padding_token_id=1, add_bos_token=True,
        **{"tokenizer.chat_template": TEMPLATE},
    )  # fmt: skip
    made, want = load_tokenizer(file), load_tokenizer(folder)
    for text in [*TEXTS, "A photo of a cat"]:
        assert made.encode(text) == want.encode(text)
        assert made.decode(made.encode(text), skip_special_tokens=True) == text
    assert made.encode("A photo of a cat") == [2, 250, 1345, 9, 10, 4758]
    assert (made.bos_token, made.eos_token, made.pad_token) == ("</s>", "</s>", "<pad>")
    assert made.chat_template == TEMPLATE
    made.save_pretrained(str(tmp_path / "saved"))
    again = load_tokenizer(tmp_path / "saved")
    assert [again.encode(text) for text in TEXTS] == [made.encode(text) for text in TEXTS]


def test_sentencepieces_merges_follow_from_scores(shared_data, tmp_path: Path) -> None:
    """A real SentencePiece vocabulary, whose pieces stand in the order of their scores."""
    source = Tokenizer.from_file(str(shared_data("stories260K-hf") / "tokenizer.json"))
    vocab = source.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]]
    scores = [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)]
    file = file_of(
        tmp_path, model="llama", tokens=tokens, token_type=types, scores=scores,
        bos_token_id=1, eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    made = load_tokenizer(file)
    story = "Once upon a time, there was a little girl named Lily. " * 3
    for text in [*TEXTS, story]:
        assert made.encode(text) == source.encode(text).ids
        assert made.decode(made.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("gpt-2", ["I", "'m", "Ġ12345", ",", "Ġ", "ĠOK", "!!", "Ċ", "x"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "ĠOK", "!!", "Ċ", "x"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", ",", "Ġ", "ĠOK", "!!Ċ", "x"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "ĠOK", "!!Ċ", "x"]),
    ],
)
def test_how_text_is_cut_into_words(cut: str, words: list[str]) -> None:
    """The models' published expressions, applied by hand."""
    assert [word for word, _ in CUTS[cut]().pre_tokenize_str("I'm 12345,  OK!!\nx")] == words


@pytest.mark.parametrize(("cut", "ids"), [("gpt-2", [4, 2]), ("llama-bpe", [5])])
def test_llama_3s_words_that_are_tokens_need_no_merges(
    tmp_path: Path, cut: str, ids: list[int]
) -> None:
    tokens = ["a", "b", "c", "</s>", "ab", "abc"]
    file = file_of(
        tmp_path, model="gpt2", pre=cut, tokens=tokens, token_type=[1, 1, 1, 3, 1, 1],
        merges=["a b"], eos_token_id=3,
    )  # fmt: skip
    assert gguf_tokenizer(open_gguf(file)).encode("abc") == ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "bert", "tokens": ["a"]}, "model='bert' is not supported: supported are 'gpt2'"),
        ({"model": "gpt2"}, r"has no tokenizer \(tokenizer.ggml.tokens\)"),
        ({"model": "gpt2", "tokens": ["a"], "pre": "odd"}, "pre='odd' is not supported: .*smollm"),
        ({"model": "llama", "tokens": ["a"]}, "has no tokenizer.ggml.scores"),
    ],
)
def test_tokenizers_that_cannot_be_read(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(open_gguf(file_of(tmp_path, **values)))


def test_a_real_file_has_the_tokenizer_of_its_hugging_face_directory(shared_data) -> None:
    """Token by token, over a thousand dialogues and the chat template."""
    file, golden = smollm2(shared_data)
    made = load_tokenizer(file)
    want = Tokenizer.from_file(str(shared_data("smollm2-135m-instruct") / "tokenizer.json"))
    source = shared_data("hh-rlhf") / "helpful-base.test.jsonl.gz"
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["chosen"] for line, _ in zip(lines, range(1000), strict=False)]
    ours = made([*texts, *TEXTS])["input_ids"]
    assert ours == [each.ids for each in want.encode_batch([*texts, *TEXTS])]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = made.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == golden["chat_prompt"]
    assert made.encode(golden["chat_prompt"]) == golden["chat_prompt_ids"]


@pytest.mark.parametrize(
    ("pre", "told", "ids"),
    [
        ("llama-bpe", {}, [3, 2]),
        ("llama3", {}, [3, 2]),
        ("llama-bpe", {"add_bos_token": False}, [2]),
        ("qwen2", {}, [2]),
        ("gpt-2", {}, [2]),
    ],
)
def test_llama_3s_texts_begin_with_bos_where_the_file_does_not_say(
    tmp_path: Path, pre: str, told: dict[str, Any], ids: list[int]
) -> None:
    """As llama.cpp reads such files: their converters left the key out."""
    file = file_of(
        tmp_path, model="gpt2", pre=pre, tokens=["a", "b", "ab", "<s>", "</s>"],
        token_type=[1, 1, 1, 3, 3], merges=["a b"], bos_token_id=3, eos_token_id=4, **told,
    )  # fmt: skip
    assert gguf_tokenizer(open_gguf(file)).encode("ab") == ids
