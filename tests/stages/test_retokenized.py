"""A reward model with a tokenizer of its own reads what it would have been trained on."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_ROWS, byte_tokenizer
from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.records import Dialogue, Message, Record
from rlhf_jax.data.render import Renderer
from rlhf_jax.data.tokenize import PromptRow, tokenize_sft
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.ppo_step import ScoringSettings, answer_scores
from rlhf_jax.engine.row_passes import ModelOnMesh, join_rows
from rlhf_jax.models.params import compute_layout, scalar_specs, store_layout
from rlhf_jax.objectives.experience import RewardSettings
from rlhf_jax.stages.retokenized import SHORTEST, TextScorer, TextWriter, bucket
from tests.models.cases import LLAMA, put_params, random_values

CFG = replace(LLAMA, vocab_size=VOCAB_ROWS, max_positions=160, tie_embeddings=True)
PROMPTS = ["add 2 and 3: ", "x", "a much longer question, with commas?", "q?"] * 2
ANSWERS = ["5", "", "because. it is so", "yes", "no", "7 of them", "-", "ß and é"]
ENDED = [True, True, False, True, True, False, True, True]


@pytest.fixture(scope="module")
def place() -> ModelOnMesh:
    return ModelOnMesh(CFG, compute_layout(CFG, make_mesh(parse_mesh("4x2"), 2)))


@pytest.fixture(scope="module")
def model(place: ModelOnMesh) -> Any:
    specs = scalar_specs(CFG)
    return put_params(random_values(specs, seed=3), specs, store_layout(CFG, place.layout.mesh))


def writer(tokenizer: Any, *, room: int = 160, score_eos: bool = True) -> TextWriter:
    return TextWriter(Encoder(tokenizer), Renderer(tokenizer, "template"), room, score_eos)


def prompt_rows(prompts: list[str]) -> list[PromptRow]:
    """Rows whose tokens, the actor's, are not looked at."""
    return [PromptRow(np.array([7], np.int32), n, text) for n, text in enumerate(prompts)]


def padded(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for n, row in enumerate(ids):
        rows[n, : len(row)] = row
    return rows, np.array([len(row) for row in ids], np.int32)


def direct_scores(model: Any, place: ModelOnMesh, train_eos: bool) -> np.ndarray:
    """What the scoring program of PPO says of the same prompts and answers, as its ids."""
    prompts, starts = padded([[BOS_ID, *text.encode()] for text in PROMPTS])
    answers, lengths = padded(
        [[*text.encode(), *[EOS_ID] * end] for text, end in zip(ANSWERS, ENDED, strict=True)]
    )
    settings = ScoringSettings(RewardSettings(train_eos=train_eos), 1.0, 0.0, 1.0, False)

    @jax.jit
    def run(model: Any, prompts: Any, starts: Any, rollout: Rollout) -> Any:
        tokens = join_rows(prompts, starts, rollout.tokens_BR, place.layout)
        return answer_scores(model, tokens, starts, rollout, place, settings)

    zeros, ends = np.zeros(answers.shape, np.float32), np.array(ENDED, np.int32)
    rollout = Rollout(answers, zeros, lengths, ends)  # pyright: ignore[reportArgumentType]
    with jax.set_mesh(place.layout.mesh):
        return np.asarray(run(model, *put_batch((prompts, starts, rollout), place.layout)))


@pytest.mark.parametrize("score_eos", [True, False])
def test_with_the_same_tokenizer_text_scores_as_ids_do(
    model: Any, place: ModelOnMesh, tolerance: Any, score_eos: bool
) -> None:
    scorer = TextScorer(writer(byte_tokenizer(), score_eos=score_eos), place)
    rows = scorer.write(prompt_rows(PROMPTS), ANSWERS, ENDED)
    with jax.set_mesh(place.layout.mesh):
        scores = scorer.score(model, rows.tokens, 8)
    want = direct_scores(model, place, score_eos)
    assert np.ptp(want) > 0.1
    np.testing.assert_allclose(scores, want, **tolerance(np.float32))


def test_rows_are_those_of_step_2() -> None:
    tokenizer = words_tokenizer()
    records = [
        Record(p, chosen=a) for p, a, end in zip(PROMPTS, ANSWERS, ENDED, strict=True) if end and a
    ]
    trained, _ = tokenize_sft(records, tokenizer, max_length=99, overlong="drop")
    prompts = prompt_rows([record.prompt for record in records])
    answers = [str(record.chosen) for record in records]
    rows = writer(tokenizer).write(prompts, answers, [True] * len(records))
    assert rows.tokens == [row.tokens.tolist() for row in trained]
    assert rows.num_cut == 0
    assert tokenizer.decode(rows.tokens[0]) == "add 2 and 3 : 5 <end>"


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and punctuation: nothing like bytes."""
    words = (
        "<unk> <end> add 2 and 3 : 5 x a much longer question with commas ? , q yes no 7 of - it"
    )
    vocab = {word: n for n, word in enumerate(words.split())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_conversation_is_written_by_the_reward_models_own_template() -> None:
    """As step 2 writes it; an answer that did not end lacks the template's end of a turn."""
    tokenizer = words_tokenizer()
    tokenizer.chat_template = TEMPLATE
    asked = (Message("user", "2 and 3 ?"),)
    prompt = PromptRow(np.array([7], np.int32), 0, "what the actor read", messages=asked)
    rows = writer(tokenizer).write([prompt, prompt], ["5", "5"], [True, False]).tokens
    dialogue = Dialogue(asked, chosen=(Message("assistant", "5"),))
    (trained,), _ = tokenize_sft([dialogue], tokenizer, max_length=99, overlong="drop")
    assert rows == [trained.tokens.tolist(), trained.tokens.tolist()[:-1]]
    assert rows[0][-1] == tokenizer.eos_token_id


def test_messages_need_a_template() -> None:
    prompt = PromptRow(np.array([7], np.int32), 0, "", messages=(Message("user", "2 ?"),))
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        writer(words_tokenizer()).write([prompt], ["5"], [True])


def test_what_does_not_fit_loses_the_front_of_its_prompt() -> None:
    """BOS, the answer and EOS stay."""
    short = writer(byte_tokenizer(), room=12)
    rows = short.write(prompt_rows(["0123456789", "0"]), ["abc", "abc"], [True, True])
    assert rows.num_cut == 1
    assert rows.tokens[0] == [BOS_ID, *b"3456789abc", EOS_ID]
    assert len(rows.tokens[0]) == 12


def test_few_lengths_are_compiled() -> None:
    assert {bucket(n) for n in range(1, 1000)} == {64, 128, 256, 512, 1024}
    assert all(bucket(n) >= n for n in range(1, 1000))
    assert bucket(SHORTEST) == SHORTEST
