"""Real transcripts through real tokenizers, from the file to batches of every stage.

The row counts were taken from the files by hand: helpful-base has 2354 pairs, 9 with different
prompts and 2 with equal answers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_jax.data.batches import bucket_of, collate_pairs, collate_prompts, common_length
from rlhf_jax.data.blend import DataConfig, StageRecords, load_stage_records
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.render import ASSISTANT
from rlhf_jax.data.sources import load_source
from rlhf_jax.data.tokenize import PromptRow, tokenize_pairs, tokenize_prompts, tokenize_sft


@pytest.fixture(scope="module")
def helpful_base(shared_data: Callable[[str], Path]) -> str:
    return str(shared_data("hh-rlhf") / "helpful-base.test.jsonl.gz")


@pytest.fixture(scope="module")
def stage_records(helpful_base: str) -> Callable[..., StageRecords]:
    return lambda stage: load_stage_records(DataConfig(data_path=(helpful_base,)), stage, seed=1234)


@pytest.fixture(scope="module")
def opt_tokenizer(shared_data: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    folder = shared_data("opt-tokenizer")
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def llama_tokenizer(shared_data: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(shared_data("stories260K-hf"))


def test_transcripts_become_prompt_and_answers(helpful_base: str) -> None:
    source = load_source(helpful_base, split="train", stage="reward")
    assert source is not None
    assert len(source.records) == 2343
    assert source.dropped == {"prompts differ": 9, "answers are equal": 2}
    prompts = [str(record.prompt) for record in source.records]
    assert all(prompt.startswith("\n\nHuman:") for prompt in prompts)
    assert all(prompt.endswith(ASSISTANT) for prompt in prompts)
    assert not any(ASSISTANT in str(record.chosen) for record in source.records)


def test_every_stage_gets_its_share(stage_records: Callable[..., StageRecords]) -> None:
    # 2343 rows: 2109 train, 234 held out. 2109 in 2,4,4: 422 + 844 + 844 is one too many.
    # 234: 47 + 94 + 94 is one too many.
    sizes = {
        stage: (len(stage_records(stage).train), len(stage_records(stage).eval))
        for stage in ("sft", "reward", "ppo")
    }
    assert sizes == {"sft": (421, 46), "reward": (844, 94), "ppo": (844, 94)}


def test_opt_puts_bos_in_front_and_ends_answers_with_the_same_id(
    opt_tokenizer: PreTrainedTokenizerFast, stage_records: Callable[..., StageRecords]
) -> None:
    assert opt_tokenizer("A photo of a cat")["input_ids"] == [2, 250, 1345, 9, 10, 4758]
    records = stage_records("sft").train
    rows, report = tokenize_sft(records, opt_tokenizer, max_length=2048, overlong="drop")
    assert report.kept + report.empty == 421
    texts = {f"{record.prompt}{record.chosen}" for record in records}
    for row in rows:
        assert row.tokens[0] == row.tokens[-1] == 2
        assert 2 not in row.tokens[1:-1]
        assert opt_tokenizer.decode(row.tokens[1:-1]) in texts


def test_a_llama_tokenizer_gives_the_same_ids_as_for_the_whole_text(
    llama_tokenizer: PreTrainedTokenizerFast, stage_records: Callable[..., StageRecords]
) -> None:
    records = [record for record in stage_records("sft").train if record.chosen][:100]
    rows, _ = tokenize_sft(records, llama_tokenizer, max_length=10_000, overlong="drop")
    wholes = llama_tokenizer([f"{record.prompt}{record.chosen}" for record in records])
    for row, whole in zip(rows, wholes["input_ids"], strict=True):
        assert row.tokens.tolist() == [*whole, llama_tokenizer.eos_token_id]


def test_pairs_and_prompts_reach_batches(
    opt_tokenizer: PreTrainedTokenizerFast, stage_records: Callable[..., StageRecords]
) -> None:
    pairs, report = tokenize_pairs(
        stage_records("reward").train, opt_tokenizer, max_length=512, overlong="drop"
    )
    assert report.kept + report.dropped + report.empty == 844
    length = common_length(pairs, 64)
    assert length == 512
    pair_loader = Loader(pairs, partial(collate_pairs, length=length), batch_size=32, seed=0)
    steps = [batch.chosen.valid_B.sum() for _, batch in pair_loader.batches(0, 27)]
    assert sum(steps[: pair_loader.num_batches]) == report.kept

    prompts, _ = tokenize_prompts(
        stage_records("ppo").train, opt_tokenizer, max_length=256, overlong="cut"
    )
    assert len(prompts) == 844
    buckets = (64, 128, 256)

    def group_of(row: PromptRow) -> int:
        return bucket_of(len(row.tokens), buckets)

    prompt_loader = Loader(
        prompts, partial(collate_prompts, buckets=buckets), batch_size=32, seed=0, group_of=group_of
    )
    widths = [batch.tokens_BP.shape[1] for _, batch in prompt_loader.batches(0, 27)]
    assert set(widths) == set(buckets)


def test_cut_turns_leaves_whole_turns(
    stage_records: Callable[..., StageRecords], opt_tokenizer: PreTrainedTokenizerFast
) -> None:
    records = stage_records("ppo").train
    rows, report = tokenize_prompts(records, opt_tokenizer, max_length=128, overlong="cut_turns")
    assert report.cut_turns > 100
    assert len(rows) + report.dropped == len(records)
    turns = [str(record.prompt).count("\n\nHuman:") for record in records]
    for row in rows:
        whole = str(records[row.sample_id].prompt)
        assert len(row.tokens) <= 128
        assert whole.endswith(row.prompt)
        assert row.prompt.startswith("\n\nHuman:")
        assert row.tokens.tolist() == opt_tokenizer(row.prompt)["input_ids"]
        left_out = turns[row.sample_id] - row.prompt.count("\n\nHuman:")
        if left_out:
            # One more turn would not fit.
            longer = whole.split("\n\nHuman:")[left_out:]
            text = "".join("\n\nHuman:" + turn for turn in longer)
            assert len(opt_tokenizer(text)["input_ids"]) > 128  # pyright: ignore[reportArgumentType]


def test_gsm8k_is_asked_by_the_chat_template_and_keeps_its_answers(
    shared_data: Callable[[str], Path],
) -> None:
    smollm = AutoTokenizer.from_pretrained(
        shared_data("smollm2-135m-instruct"), eos_token="<|im_end|>"
    )
    path = str(shared_data("gsm8k") / "gsm8k_test.jsonl.gz")
    source = load_source(path, split="train", stage="ppo")
    assert source is not None
    rows, report = tokenize_prompts(source.records, smollm, max_length=256, overlong="drop")
    assert (len(rows), report.kept) == (1319, 1319)
    assert all("\n#### " in str(row.columns["answer"]) for row in rows)
    assert smollm.decode(rows[0].tokens) == rows[0].prompt
    assert rows[0].prompt.endswith(
        "every day at the farmers' market?<|im_end|>\n<|im_start|>assistant\n"
    )
