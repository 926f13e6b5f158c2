"""The quickstart's tokenizer: one token a byte, built in code, so nothing is downloaded.

Token `b` is the byte `b`; then come `<pad>`, `<bos>` and `<eos>`. There are no merges and no
unknown token: every text encodes, and every text comes back. The names of the special tokens
in a text are ordinary bytes, so no prompt can smuggle one in.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_ROWS = 264
"""259 tokens rounded up to a multiple of 8: the vocabulary of a model made for this tokenizer."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer that encodes text as `<bos>` and its UTF-8 bytes.

    `save_pretrained` writes it and `AutoTokenizer.from_pretrained` reads it again. Bytes that
    are not UTF-8 decode to U+FFFD, as everywhere; as ids they are exact (`bytes(ids)`).
    """
    vocab = {letter: byte for byte, letter in enumerate(_letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Each byte becomes one printable letter, and back; the regex of GPT-2 would only split words.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    specials = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    assert {name: tokenizer.token_to_id(name) for name in specials} == specials
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="right",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _letters_of_bytes() -> list[str]:
    """The printable letter that byte-level tokenizers write for each of the 256 bytes.

    GPT-2's table (`bytes_to_unicode`): printable Latin-1 stands for itself, and the other bytes
    are, in order, the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(b if b in printable else 0x100 + hidden.index(b)) for b in range(256)]
