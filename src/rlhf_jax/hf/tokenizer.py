"""Tokenizers of Hugging Face directories, checked against the model that they feed."""

import copy
import json
import logging
from pathlib import Path

from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from rlhf_jax.hf.config_io import read_json
from rlhf_jax.hf.gguf import is_gguf, open_gguf
from rlhf_jax.hf.gguf_tokenizer import gguf_tokenizer
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.hf_table import stop_ids

log = logging.getLogger(__name__)

TURN_FORMAT = "turn_format"
"""Key of tokenizer_config.json, where transformers keeps what it does not know."""

OPT_TOKENS = {"</s>": 2, "<pad>": 1}
"""What tells OPT's vocabulary from GPT-2's, which has files of the same names."""


def load_tokenizer(
    directory: Path | str, cfg: ModelConfig | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory or GGUF file, right-padding; with `cfg` it must fit that model.

    A directory with `vocab.json` and `merges.txt` alone is read as OPT's, which puts `</s>` in
    front of every text. Where the tokenizer names no EOS, the (first) one of config.json is it.
    Raises FileNotFoundError where there is none, ValueError where it does not fit.
    """
    path = Path(directory)
    if is_gguf(path):
        tokenizer = gguf_tokenizer(open_gguf(path))
        tokenizer.padding_side = "right"
        check_tokenizer(tokenizer, cfg, str(path))
        return tokenizer
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: no tokenizer there")
    if is_bare_opt(path):
        tokenizer = opt_tokenizer(path)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} has no tokenizer that can be loaded: it needs tokenizer.json, or "
                f"vocab.json and merges.txt. transformers says: {first_line(error)}"
            ) from error
    if tokenizer.eos_token is None:
        tokenizer.eos_token = config_eos(path, tokenizer)
    tokenizer.padding_side = "right"
    check_tokenizer(tokenizer, cfg, str(path))
    return tokenizer


def config_eos(path: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that config.json says ends a text, the first where it says several."""
    file = path / "config.json"
    ids = stop_ids(read_json(file).get("eos_token_id")) if file.is_file() else None
    first = next(iter(ids), None) if isinstance(ids, tuple) else ids
    if first is None:
        return None
    (token,) = tokenizer.convert_ids_to_tokens([first])
    if token is not None:
        log.info("%s: the tokenizer names no EOS, config.json does: %s", path, token)
    return token


def is_bare_opt(path: Path) -> bool:
    """Whether a directory holds OPT's vocabulary without a word on which class reads it."""
    if any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    if not all((path / name).is_file() for name in ("vocab.json", "merges.txt")):
        return False
    vocab = json.loads((path / "vocab.json").read_text(encoding="utf-8"))
    return all(vocab.get(token) == index for token, index in OPT_TOKENS.items())


def opt_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """OPT's byte-level BPE, as facebook/opt-* configure it."""
    return GPT2Tokenizer(
        vocab=str(path / "vocab.json"),
        merges=str(path / "merges.txt"),
        unk_token="</s>",
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        add_bos_token=True,
    )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, cfg: ModelConfig | None, where: str
) -> None:
    """ValueError unless the end of a text is one token and every token has a row in the model."""
    eos = tokenizer.eos_token
    if eos is None or not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(
            f"{where}: the tokenizer has no eos_token, so no text could end: "
            "set eos_token in tokenizer_config.json, or eos_token_id in config.json"
        )
    ids = tokenizer.encode(str(eos), add_special_tokens=False, split_special_tokens=False)
    if ids != [tokenizer.eos_token_id]:
        raise ValueError(
            f"{where}: the eos_token {eos!r} is encoded as {ids}, not as the one id "
            f"{tokenizer.eos_token_id}: it must be a special token of the vocabulary"
        )
    if cfg is not None and len(tokenizer) > cfg.vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, the model {cfg.vocab_size} "
            "embedding rows: use the tokenizer that belongs to the model"
        )


def choose_pad_id(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """A pad id for a scorer's config that is not a stop id.

    The first that is free: the model's or tokenizer's own, the unknown token, the first token of
    texts, else the last token of the vocabulary.
    """
    wanted: list[int | None] = [cfg.pad_token_id]
    size = cfg.vocab_size
    if tokenizer is not None:
        size = min(size, len(tokenizer))
        wanted += [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]  # pyright: ignore
    wanted.append(cfg.bos_token_id)
    stops = {*cfg.stop_ids}
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)  # pyright: ignore
    free = [i for i in [*wanted, *reversed(range(size))] if i is not None and i not in stops]
    fitting = [i for i in free if 0 <= i < size]
    if not fitting:
        raise ValueError(f"every one of the {size} tokens is a stop token: none is left for pads")
    return fitting[0]


def with_pad_id(tokenizer: PreTrainedTokenizerBase, pad_id: int) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that pads with `pad_id`, as the exported config says."""
    if tokenizer.pad_token_id == pad_id:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    return changed


def turn_format_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """How the model was asked in training, as `with_turn_format` has noted it; None: nothing is."""
    return tokenizer.init_kwargs.get(TURN_FORMAT)


def with_turn_format(
    tokenizer: PreTrainedTokenizerBase, turn_format: str | None
) -> PreTrainedTokenizerBase:
    """The tokenizer with a note in its tokenizer_config.json of how a question is written; with
    None a copy without one.
    """
    if turn_format_of(tokenizer) == turn_format:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.init_kwargs.pop(TURN_FORMAT, None)
    if turn_format is not None:
        changed.init_kwargs[TURN_FORMAT] = turn_format
    return changed


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
