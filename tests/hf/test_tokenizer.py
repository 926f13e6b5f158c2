"""Tokenizers: OPT's bare files, exports, and what does not fit a model."""

import json
import shutil
from dataclasses import replace

import pytest

from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_ROWS, byte_tokenizer
from rlhf_jax.hf.tokenizer import (
    choose_pad_id,
    load_tokenizer,
    turn_format_of,
    with_pad_id,
    with_turn_format,
)
from rlhf_jax.models.families import SIZES

OPT = SIZES["facebook/opt-125m"]


def test_opts_bare_files_put_the_stop_token_in_front(shared_data, tmp_path):
    tokenizer = load_tokenizer(shared_data("opt-tokenizer"), OPT)
    want = [2, 250, 1345, 9, 10, 4758]
    assert tokenizer("A photo of a cat")["input_ids"] == want
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 1, 50265)
    assert tokenizer.decode(want, skip_special_tokens=True) == "A photo of a cat"
    tokenizer.save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path, OPT)("A photo of a cat")["input_ids"] == want


def test_opts_files_beside_a_config_alone_are_read_the_same(shared_data, tmp_path):
    """AutoTokenizer would read them as GPT-2's, without a front token and with another stop id."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared_data("opt-tokenizer") / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    tokenizer = load_tokenizer(tmp_path, OPT)
    assert tokenizer("A photo of a cat")["input_ids"] == [2, 250, 1345, 9, 10, 4758]


def test_real_tokenizers_load_right_padding(shared_data):
    tokenizer = load_tokenizer(shared_data("stories260K-hf"))
    assert tokenizer.padding_side == "right"
    want = json.loads((shared_data("stories260K-hf") / "golden.json").read_text())
    assert tokenizer(want["prompt"])["input_ids"] == want["prompt_ids"]


def test_a_directory_without_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded.*tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(tmp_path):
    byte_tokenizer().save_pretrained(str(tmp_path))
    assert len(load_tokenizer(tmp_path, replace(OPT, vocab_size=VOCAB_ROWS))) == 259
    with pytest.raises(ValueError, match="has 259 tokens, the model 258 embedding rows"):
        load_tokenizer(tmp_path, replace(OPT, vocab_size=258))


def test_the_stop_token_must_be_one_token(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("eos", [EOS_ID, [EOS_ID, BOS_ID]])
def test_a_tokenizer_that_names_no_stop_token_has_that_of_the_config(tmp_path, eos):
    tokenizer = byte_tokenizer()
    named = tokenizer.eos_token
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    assert load_tokenizer(tmp_path).eos_token == named
    load_tokenizer(tmp_path).save_pretrained(str(tmp_path))
    config.write_text(json.dumps({"model_type": "llama", "eos_token_id": BOS_ID}))
    assert load_tokenizer(tmp_path).eos_token == named, "the tokenizer's own comes first"


@pytest.mark.parametrize("eos", [None, [], 10_000])
def test_a_config_that_names_none_either_does_not_help(tmp_path, eos):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    config = {"model_type": "llama", "eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no eos_token, .* or eos_token_id in config.json"):
        load_tokenizer(tmp_path)


def test_a_real_directory_whose_config_alone_names_the_stop_token(shared_data):
    tokenizer = load_tokenizer(shared_data("smollm2-135m-instruct"))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.chat_template


def test_pad_ids_are_never_stop_ids():
    tokenizer = byte_tokenizer()
    cfg = replace(OPT, vocab_size=VOCAB_ROWS, eos_token_id=EOS_ID, pad_token_id=5)
    assert choose_pad_id(cfg, tokenizer) == 5
    tokenizer.pad_token = tokenizer.eos_token
    aliased = replace(cfg, pad_token_id=EOS_ID)
    assert choose_pad_id(aliased, tokenizer) == BOS_ID
    assert with_pad_id(tokenizer, BOS_ID).pad_token_id == BOS_ID
    assert tokenizer.pad_token_id == EOS_ID
    tiny = replace(OPT, vocab_size=2, bos_token_id=None, eos_token_id=(0, 1), pad_token_id=None)
    with pytest.raises(ValueError, match="none is left for pads"):
        choose_pad_id(tiny, None)


@pytest.mark.parametrize("name", ["opt-tokenizer", "smollm2-135m-instruct"])
def test_a_saved_tokenizer_says_how_the_model_was_asked(name, shared_data, tmp_path):
    """It reads text as before, a copy for a reward model says it too, and it can be taken out."""
    tokenizer, asked = load_tokenizer(shared_data(name)), "\n\nHuman: {}\n\nAssistant:"
    assert turn_format_of(tokenizer) is None
    noted = with_turn_format(tokenizer, asked)
    assert turn_format_of(tokenizer) is None
    with_pad_id(noted, 7).save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert turn_format_of(loaded) == asked
    assert loaded.encode("Human: a") == tokenizer.encode("Human: a")
    assert turn_format_of(with_turn_format(loaded, None)) is None
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["turn_format"] == asked
