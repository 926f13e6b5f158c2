"""Golden checkpoints with a tokenizer, as `load` wants them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import rlhf_jax

GOLDENS = Path(__file__).parents[1] / "goldens"
BOS, EOS = 1, 2


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, of the 90 that the golden models know: `w4` is token 4."""
    specials = {"<pad>": 0, "<s>": BOS, "</s>": EOS, "<unk>": 3}
    words = {f"w{n}": n for n in range(4, 90)}
    tokenizer = Tokenizer(models.WordLevel(specials | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory_of("llama")`: a golden checkpoint with `word_tokenizer` in it."""

    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name) / name
        shutil.copytree(GOLDENS / name, directory)
        word_tokenizer().save_pretrained(str(directory))
        return directory

    return make


@pytest.fixture(scope="session")
def llama(directory_of: Callable[[str], Path]) -> rlhf_jax.Model:
    """The golden Llama on one device: 90 tokens (128 with padding), 64 positions."""
    return rlhf_jax.load(directory_of("llama"), mesh="1x1")


@pytest.fixture(scope="session")
def scorer(directory_of: Callable[[str], Path]) -> rlhf_jax.Model:
    """The golden reward model on one device; its config says untied, as a language model's may."""
    return rlhf_jax.load(directory_of("llama_scorer"), mesh="1x1")


@pytest.fixture(scope="session")
def numbers() -> Callable[[str], dict[str, np.ndarray]]:
    """`numbers("llama")`: what transformers computed."""
    return lambda name: dict(np.load(GOLDENS / name / "golden.npz"))
