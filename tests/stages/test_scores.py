"""What reward functions are told of a rollout, and what becomes of their scores."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from rlhf_jax.data.batches import collate_prompts
from rlhf_jax.data.byte_tokenizer import EOS_ID, byte_tokenizer
from rlhf_jax.data.encoder import Encoder, text_behind
from rlhf_jax.data.records import Dialogue, Example, Message, Record
from rlhf_jax.data.render import Renderer
from rlhf_jax.data.tokenize import PromptRow, tokenize_pairs, tokenize_prompts, tokenize_sft
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.stages.retokenized import TextWriter
from rlhf_jax.stages.reward_functions import RewardFunction
from rlhf_jax.stages.scores import HostScorer, HostScores, TextReward

TOKENIZER = byte_tokenizer()
RECORDS = [
    Record("one? ", columns={"answer": "1", "level": 3}),
    Record("two? ", columns={"answer": "2"}),
    Record("three? ", columns={"answer": "3", "level": 1}),
]
SAID = ["1", "not two", "3"]


def rows_and_batch() -> tuple[Mapping[int, PromptRow], Any]:
    """Three prompts, the last one first, in a batch of four."""
    rows, _ = tokenize_prompts(RECORDS, TOKENIZER, max_length=40, overlong="drop")
    batch = collate_prompts(rows[::-1], 4, buckets=(16,))
    return {row.sample_id: row for row in rows}, batch


def rollout() -> Rollout:
    """The answers of the batch; the second one has no EOS, the filler row says nonsense."""
    ends = [False, True, True, False]
    texts = [*SAID[::-1], "nonsense"]
    ids = [[*text.encode(), *[EOS_ID] * end] for text, end in zip(texts, ends, strict=True)]
    tokens = np.zeros((4, 12), np.int32)
    for n, row in enumerate(ids):
        tokens[n, : len(row)] = row
    lengths = np.array([len(row) for row in ids], np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    arrays = (tokens, logprobs, lengths, np.array(ends, np.int32))
    return Rollout(*(jnp.asarray(array) for array in arrays))


def equal(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(a == c) for a, c in zip(answer, completions, strict=True)]


def easy(prompts: Any, completions: Any, level: Any, **columns: Any) -> list[float | None]:
    return [n if n is None else float(n) for n in level]


def functions(*pairs: tuple[Any, float]) -> list[RewardFunction]:
    return [RewardFunction(f"m:{f.__name__}", f.__name__, weight, f) for f, weight in pairs]


def score(functions: Sequence[RewardFunction], *, alone: bool = True) -> HostScores:
    rows, batch = rows_and_batch()
    scorer = HostScorer(TOKENIZER, functions, None, alone=alone)
    scores = scorer.score(batch, rows, rollout(), None)
    assert scores is not None
    return scores


def test_a_function_sees_the_real_rows_as_text_ids_and_columns() -> None:
    seen: dict[str, Any] = {}

    def spy(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0] * len(given["prompts"])

    score(functions((spy, 1.0)))
    ids = seen.pop("completion_ids")
    assert seen == {
        "prompts": ["three? ", "two? ", "one? "],
        "completions": ["3", "not two", "1"],
        "answer": ["3", "2", "1"],
        "level": [1, None, 3],
    }
    assert ids == [[*b"3"], [*b"not two", EOS_ID], [*b"1", EOS_ID]]


def test_a_prompt_that_stands_in_a_batch_twice_is_its_row_twice() -> None:
    rows, _ = tokenize_prompts(RECORDS, TOKENIZER, max_length=40, overlong="drop")
    batch = collate_prompts([rows[1], rows[0], rows[1]], 4, buckets=(16,))
    seen: list[Any] = []

    def spy(answer: Any, **given: Any) -> list[float]:
        seen.extend(answer)
        return [0.0] * len(given["prompts"])

    scorer = HostScorer(TOKENIZER, functions((spy, 1.0)), None, alone=True)
    scorer.score(batch, {row.sample_id: row for row in rows}, rollout(), None)
    assert len(set(batch.sample_ids_B[:3].tolist())) == 3
    assert seen == ["2", "1", "2"]


def test_scores_are_weighted_and_filler_rows_get_none() -> None:
    scores = score(functions((equal, 2.0), (easy, -0.5)))
    assert scores.total_B.tolist() == [2 - 0.5, 0, 2 - 1.5, 0]
    assert scores.total_B.dtype == np.float32
    assert scores.parts["equal"].tolist() == [1, 0, 1]


def test_metrics_are_means_over_the_judged_rows_of_all_batches() -> None:
    judges = functions((equal, 2.0), (easy, -0.5))
    scorer = HostScorer(TOKENIZER, judges, None, alone=True)
    metrics = scorer.metrics([score(judges), score(judges)])
    assert metrics["rewards/equal/mean"] == pytest.approx(2 / 3)
    assert metrics["rewards/equal/std"] == pytest.approx(np.std([1, 0, 1]))
    assert metrics["rewards/easy/mean"] == 2.0
    assert metrics["rewards/easy/std"] == 1.0
    assert scorer.metrics([]) == {}


def test_a_name_that_judges_nothing_has_no_metric() -> None:
    def abstains(completions: Any, **given: Any) -> list[None]:
        return [None] * len(completions)

    judges = functions((equal, 1.0), (abstains, 1.0))
    metrics = HostScorer(TOKENIZER, judges, None, alone=True).metrics([score(judges)])
    assert set(metrics) == {"rewards/equal/mean", "rewards/equal/std"}


def test_a_row_that_nothing_judges_is_an_error_unless_a_reward_model_scores_it() -> None:
    message = "every reward function returned None for the prompt 'two. ', and no reward model"
    with pytest.raises(ValueError, match=message):
        score(functions((easy, 1.0)))
    assert score(functions((easy, 1.0)), alone=False).total_B.tolist() == [1, 0, 3, 0]


def test_messages_are_handed_over_as_messages() -> None:
    seen: dict[str, Any] = {}

    def spy(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0] * len(given["prompts"])

    asked = (Message("system", "Be brief."), Message("user", "two?"))
    row = PromptRow(np.array([1], np.int32), 7, "two?", messages=asked)
    batch = collate_prompts([row], 4, buckets=(8,))
    HostScorer(TOKENIZER, functions((spy, 1.0)), None, alone=True).score(
        batch, {7: row}, rollout(), None
    )
    assert seen["prompts"] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two?"}]
    ]
    assert seen["completions"] == [[{"role": "assistant", "content": "3"}]]


def test_without_functions_nothing_is_scored_here() -> None:
    rows, batch = rows_and_batch()
    assert HostScorer(TOKENIZER, [], None, alone=False).score(batch, rows, rollout(), None) is None


class Lengths:
    """A scorer of text in place of a model: the length of prompt and answer, 10 for an EOS."""

    def write(self, records: Any, answers: Any, ended: Any) -> Any:
        tokens = [
            [0] * (len(r.prompt + a) + 10 * end)
            for r, a, end in zip(records, answers, ended, strict=True)
        ]
        return SimpleNamespace(tokens=tokens, num_cut=1)

    def score(self, model: Any, rows: Any, batch_size: int) -> np.ndarray:
        assert batch_size == 4
        return np.array([len(row) for row in rows], np.float32)


def test_a_reward_model_of_text_is_standardised_weighted_and_added() -> None:
    rows, batch = rows_and_batch()
    scorer: Any = Lengths()
    text = TextReward(scorer, mean=10.0, std=2.0, weight=0.5)
    host = HostScorer(TOKENIZER, functions((equal, 1.0)), text, alone=False)
    model: Any = object()
    scores = host.score(batch, rows, rollout(), model)
    assert scores is not None
    lengths = np.array([len("three? 3"), len("two? not two") + 10, len("one? 1") + 10])
    np.testing.assert_allclose(scores.total_B[:3], (lengths - 10) / 2 * 0.5 + [1, 0, 1])
    metrics = host.metrics([scores, scores])
    assert metrics["rewards/reward_model/mean"] == pytest.approx(((lengths - 10) / 2).mean())
    assert metrics["rewards/reward_model/num_cut"] == 2


def marked_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is put in front of a text, and taken off the text of ids."""
    letters = ["<s>", "</s>", "▁", "\n", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


WHY = (Message("user", "Why?"),)
TEXT = Record("\n\nHuman: Why?\n\nAssistant:", " Because.", " No.")
DIALOGUE = Dialogue(WHY, (Message("assistant", "Because."),), (Message("assistant", "No."),))


@pytest.mark.parametrize("example", [TEXT, DIALOGUE])
@pytest.mark.parametrize("actor", [TOKENIZER, marked_tokenizer()])
def test_an_answer_is_what_step_2_read(example: Example, actor: PreTrainedTokenizerFast) -> None:
    """The actor says the better answer: space in front and all."""
    settings: Any = {
        "max_length": 99, "overlong": "drop", "chat_format": "human_assistant",
    }  # fmt: skip
    (mine,), _ = tokenize_sft([example], actor, **settings)
    (prompt,), _ = tokenize_prompts([example], actor, **settings)
    (pair,), _ = tokenize_pairs([example], TOKENIZER, **settings)
    renderer, seen = Renderer(TOKENIZER, "human_assistant"), []
    writer, told = TextWriter(Encoder(TOKENIZER), renderer, 99, score_eos=True), {}

    def write(*given: Any) -> Any:
        seen.extend(writer.write(*given).tokens)
        return writer.write(*given)

    def spy(**given: Any) -> list[float]:
        told.update(given)
        return [0.0]

    scorer: Any = SimpleNamespace(write=write, score=lambda *_: np.zeros(1, np.float32))
    host = HostScorer(actor, functions((spy, 1.0)), TextReward(scorer, 0.0, 1.0, 1.0), alone=False)
    answer = jnp.asarray(mine.tokens[mine.prompt_length :][None])
    ends = jnp.array([answer.size]), jnp.array([True])
    said = Rollout(answer, jnp.zeros(answer.shape), *ends)
    model: Any = object()
    host.score(collate_prompts([prompt], 1, buckets=(64,)), {0: prompt}, said, model)
    assert seen == [pair.chosen.tolist()]
    dialogue = [{"role": "assistant", "content": "Because."}]
    assert told["completions"] == [" Because." if example is TEXT else dialogue]


SPACED = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else
%} {{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("make", [byte_tokenizer, marked_tokenizer])
def test_a_space_that_a_template_writes_is_no_part_of_an_answer(make: Any) -> None:
    """As Llama 2's does, which has a space in front of what the assistant says."""
    actor = make()
    actor.chat_template = SPACED
    (mine,), _ = tokenize_sft([DIALOGUE], actor, max_length=99, overlong="drop")
    (prompt,), _ = tokenize_prompts([DIALOGUE], actor, max_length=99, overlong="drop")
    answer = mine.tokens[mine.prompt_length :].tolist()
    text = text_behind(prompt.tokens.tolist(), answer[:-1], actor)
    assert text == " Because."
    assert prompt.said(text) == Message("assistant", "Because.")
