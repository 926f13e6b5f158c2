"""Running text in blocks of equal length, for the pretraining mixture of stage ppo (PTX).

Documents are tokenised as stage sft tokenises a row (what the tokenizer puts in front of a text,
the text, EOS), written one behind another and cut into blocks: no padding, and no token twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.records import Record
from rlhf_jax.data.sources import Source, load_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BlocksReport:
    """What became of the text. `left_over` counts the tokens behind the last whole block."""

    sources: tuple[str, ...]
    documents: int
    blocks: int
    block_length: int
    left_over: int

    def __str__(self) -> str:
        return (
            f"{'; '.join(self.sources)}: {self.blocks} blocks of {self.block_length} tokens out "
            f"of {self.documents} documents, {self.left_over} tokens left over"
        )


def load_text_blocks(
    paths: Sequence[str], tokenizer: "PreTrainedTokenizerBase", block_length: int
) -> tuple[list[np.ndarray], BlocksReport]:
    """int32 rows of `block_length` tokens each, in the order of the sources' train splits.

    A document is the `text` of a row; of a row in another shape that stage sft takes, its prompt
    and answer.

    Raises:
        ValueError: fewer tokens than one block, or what `load_source` and `Encoder` raise.
        FileNotFoundError: as `load_source`.
    """
    if block_length < 1:
        raise ValueError(f"block_length={block_length}: it must be at least 1")
    encoder = Encoder(tokenizer)
    sources = [_train_source(path) for path in paths]
    # One array a document: lists of Python integers take nine times the memory.
    arrays = [np.asarray(ids, np.int32) for source in sources for ids in _ids(source, encoder)]
    stream = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    num_blocks, left_over = divmod(len(stream), block_length)
    names = tuple(str(source) for source in sources)
    report = BlocksReport(names, len(arrays), num_blocks, block_length, left_over)
    if not num_blocks:
        raise ValueError(
            f"{', '.join(paths)}: {len(stream)} tokens make no block of {block_length}: "
            "give more text, or ask for shorter blocks"
        )
    return list(stream[: num_blocks * block_length].reshape(num_blocks, block_length)), report


def _train_source(path: str) -> Source:
    source = load_source(path, split="train", stage="sft")
    assert source is not None, "only an eval split may be missing"
    return source


def _ids(source: Source, encoder: Encoder) -> Iterator[list[int]]:
    texts = [
        record.prompt + (record.chosen or "")
        for record in source.records
        if isinstance(record, Record)
    ]
    if len(texts) < len(source.records):
        raise ValueError(
            f"{source.path}: its rows are conversations; running text has columns text, or prompt "
            "and completion, and is no list of messages"
        )
    for ids in encoder.plain(texts):
        yield [*encoder.prefix, *ids, encoder.eos_id]
