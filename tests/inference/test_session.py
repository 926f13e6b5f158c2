"""Answers, logits and scores of the Python surface are those of transformers and of each other."""

import json
import re

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.cli.deepspeed_names import VALUES
from rlhf_jax.inference import session
from rlhf_jax.inference.dtypes import SHORT
from rlhf_jax.stages.statistics_file import read_statistics

PROMPTS = ["w10 w11 w12", "w40", [1, 60, 61, 62, 63, 64]]


@pytest.fixture(scope="module")
def greedy(llama) -> list[rlhf_jax.Generation]:
    return llama.generate(PROMPTS, max_new_tokens=8, temperature=0.0, stop_ids=[])


def test_logits_equal_those_of_transformers_whatever_stands_behind_a_row(
    llama, numbers, tolerance
) -> None:
    golden = numbers("llama")
    tokens, lengths = golden["right_tokens"].copy(), golden["lengths"]
    behind = np.arange(tokens.shape[1]) >= lengths[:, None]
    tokens[behind] = 999
    logits = llama.logits(tokens, lengths)
    assert logits.shape == (3, 12, 90)
    assert logits.dtype == np.float32
    want = golden["right_logits"][~behind]
    np.testing.assert_allclose(logits[~behind], want, **tolerance(np.float32))
    assert not logits[behind].any()


def test_greedy_tokens_are_the_likeliest_and_have_the_log_probability_of_the_logits(
    llama, greedy, tolerance
) -> None:
    prompts = [[1, 10, 11, 12], [1, 40], [1, 60, 61, 62, 63, 64]]
    for prompt, answer in zip(prompts, greedy, strict=True):
        assert len(answer.tokens) == 8
        (logits,) = llama.logits([prompt + answer.tokens])
        predicted = logits[len(prompt) - 1 : -1]
        assert predicted.argmax(-1).tolist() == answer.tokens
        logprobs = predicted.max(-1) - np.log(np.exp(predicted).sum(-1))
        np.testing.assert_allclose(answer.logprobs, logprobs, **tolerance(np.float32))


@pytest.mark.parametrize("told", [int, np.int64, lambda token: [token]])
def test_tokens_end_with_the_stop_token_and_text_leaves_it_out(llama, greedy, told) -> None:
    stop = greedy[0].tokens[3]
    want = greedy[0].tokens[: greedy[0].tokens.index(stop) + 1]
    stopped = llama.generate(PROMPTS, max_new_tokens=8, temperature=0.0, stop_ids=told(stop))[0]
    assert stopped.tokens == want
    assert len(stopped.logprobs) == len(want)
    assert stopped.stopped
    assert not greedy[0].stopped
    assert stopped.text.split() == [f"w{token}" for token in want[:-1] if token > 3]


def test_a_sample_depends_on_seed_number_and_place_alone(llama) -> None:
    def ask(prompts, **options) -> list[list[int]]:
        answers = llama.generate(prompts, max_new_tokens=8, **options)
        return [answer.tokens for answer in answers]

    many = ask(PROMPTS, num_samples=2, seed=1)
    assert many == ask(PROMPTS, num_samples=2, seed=1, batch_size=4)
    assert many[:2] == ask(PROMPTS[:1], num_samples=2, seed=1)
    assert many[::2] == ask(PROMPTS, seed=1)
    assert many != ask(PROMPTS, num_samples=2, seed=2)
    assert many[::2] != many[1::2]


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_prompts_that_wait_for_a_place_get_the_same_answers(llama, directory_of, mesh) -> None:
    """All 21 at once, and eight with the others in the places of those that end."""
    model = llama if mesh == "1x1" else rlhf_jax.load(directory_of("llama"), mesh=mesh)
    prompts = [[1, 10 + n, *range(40, 40 + n % 5)] for n in range(21)]
    options = {"max_new_tokens": 8, "stop_ids": list(range(4, 20)), "seed": 3}
    want = llama.generate(prompts, batch_size=32, **options)
    got = model.generate(prompts, batch_size=8, **options)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
    assert [answer.stopped for answer in got] == [answer.stopped for answer in want]
    assert len({len(answer.tokens) for answer in want}) > 4


def test_a_mesh_changes_nothing(llama, greedy, directory_of, tolerance) -> None:
    spread = rlhf_jax.load(directory_of("llama"))
    assert spread.mesh.size == 8
    answers = spread.generate(PROMPTS, max_new_tokens=8, temperature=0.0, stop_ids=[])
    assert [a.tokens for a in answers] == [a.tokens for a in greedy]
    rows = [[1, 10, 11, 12], [1, 40, 41, 42]]
    np.testing.assert_allclose(spread.logits(rows), llama.logits(rows), **tolerance(np.float32))


def test_what_is_saved_loads_again(llama, tmp_path) -> None:
    llama.save_hf(tmp_path / "saved")
    again = rlhf_jax.load(tmp_path / "saved", mesh="1x1")
    tokens = [[1, 10, 11, 12]]
    np.testing.assert_array_equal(again.logits(tokens), llama.logits(tokens))
    assert again.stop_ids == llama.stop_ids


def test_what_is_saved_over_another_model_takes_nothing_of_it(
    llama, scorer, directory_of, tmp_path
) -> None:
    other = rlhf_jax.load(directory_of("llama"), mesh="1x1")
    other.tokenizer.chat_template = "{{ messages[0].content }}"
    other.save_hf(tmp_path)
    assert rlhf_jax.load(tmp_path, mesh="1x1").tokenizer.chat_template
    llama.save_hf(tmp_path)
    assert rlhf_jax.load(tmp_path, mesh="1x1").tokenizer.chat_template is None
    (tmp_path / "score_statistics.json").write_text('{"mean": 0.5, "std": 2.0}')
    scorer.save_hf(tmp_path)  # it has no statistics
    assert not (tmp_path / "score_statistics.json").exists()


def test_a_reward_model_is_saved_with_the_scale_of_its_scores(directory_of, tmp_path) -> None:
    directory = directory_of("llama_scorer")
    (directory / "score_statistics.json").write_text('{"mean": 0.5, "std": 2.0}')
    rlhf_jax.load(directory, mesh="1x1").save_hf(tmp_path / "saved")
    again = rlhf_jax.load(tmp_path / "saved", mesh="1x1")
    assert read_statistics(again.source) == (0.5, 2.0)
    again.save_hf(tmp_path / "saved")
    assert read_statistics(again.source) == (0.5, 2.0)


def test_short_names_of_dtypes_are_those_of_training(llama, directory_of, tmp_path) -> None:
    assert VALUES["dtype"] == SHORT
    short = rlhf_jax.load(directory_of("llama"), mesh="1x1", dtype="bf16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(short.params)} == {"bfloat16"}
    short.save_hf(tmp_path / "own")
    llama.save_hf(tmp_path / "asked", dtype="bf16")
    names = {
        json.loads((tmp_path / n / "config.json").read_text())["dtype"] for n in ("own", "asked")
    }
    assert names == {"bfloat16"}


def test_where_and_how_a_model_cannot_be_saved_is_explained(llama, tmp_path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    for target in (tmp_path / "notes.md", tmp_path / "notes.md" / "model"):
        with pytest.raises(ValueError, match=r"cannot be a directory, \S*notes.md is a file"):
            llama.save_hf(target)
    with pytest.raises(ValueError, match="dtype='int8' is not supported: use float32, float16, bf"):
        llama.save_hf(tmp_path / "model", dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"adapter holds an adapter \(adapter_config.json\): name "
    ):
        llama.save_hf(adapter)  # transformers would add it to the merged model
    assert len(list(adapter.iterdir())) == 1


def test_a_call_has_a_limit_of_prompts(llama, monkeypatch) -> None:
    """Beyond it two samples would have one number, and the same random numbers."""
    monkeypatch.setattr(session, "MAX_PROMPTS", 2)
    assert len(llama.generate(PROMPTS[:2], max_new_tokens=1)) == 2
    with pytest.raises(ValueError, match="got 3 prompts, one call takes at most 2"):
        llama.generate(PROMPTS, max_new_tokens=1)


def test_scores_equal_those_of_transformers(scorer, numbers, tolerance) -> None:
    golden = numbers("llama_scorer")
    rows = [
        row[:n].tolist() for row, n in zip(golden["right_tokens"], golden["lengths"], strict=True)
    ]
    np.testing.assert_allclose(scorer.score(rows), golden["scores"], **tolerance(np.float32))


def test_a_string_is_scored_with_its_end(scorer) -> None:
    text, ids = "w10 w11", [1, 10, 11]
    assert scorer.score([text]) == scorer.score([[*ids, 2]])
    assert scorer.score([text], add_eos=False) == scorer.score([ids])


def test_nothing_asked_nothing_answered(llama, scorer) -> None:
    assert llama.generate([]) == []
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate("w10"), "put it in []"),
        (lambda m: m.generate(["w10", ""]), "text 1 is empty: to start from nothing"),
        (lambda m: m.generate([[]]), "text 0 is empty"),
        (lambda m: m.generate([1, 2]), "text 0 must be a string or a list of token ids, got 1"),
        (lambda m: m.generate(t for t in ["w10"]), "got a generator where a list of texts is"),
        (lambda m: m.generate(m.tokenizer(["w10"])), "got a BatchEncoding where a list of texts"),
        (lambda m: m.generate({"w10"}), "got a set where a list of texts is wanted"),
        (lambda m: m.generate(None), "got a NoneType where a list of texts is wanted"),
        (lambda m: m.logprobs(t for t in ["w10"]), "got a generator where a list of texts is"),
        (lambda m: m.generate(["w10", "w\ud800"]), "text 1: no Unicode text: half of a surrogate"),
        (lambda m: m.generate([[0.5]]), "text 0 must be a string or a list of token ids"),
        (lambda m: m.generate([[5, 90]]), "text 0 has token id 90, the model's vocabulary is 0"),
        (
            lambda m: m.generate([[5] * 40], max_new_tokens=30),
            "text 0 has 40 tokens and an answer of up to 30, the model has 64 positions",
        ),
        (lambda m: m.generate(["w10"], max_new_tokens=64), "the model has 64 positions"),
        (lambda m: m.generate(["w10 w11"], prompt_length=2), "must hold the longest prompt (3"),
        (lambda m: m.generate(["w10"], num_samples=0), "num_samples=0"),
        (lambda m: m.generate(["w10"], stop_ids=[-1]), "stop_ids has token id -1"),
        (lambda m: m.generate(["w10"], stop_ids="w5"), "stop_ids must be a list of token ids, got"),
        (lambda m: m.generate(["w10"], stop_ids=1.5), "stop_ids must be a list of token ids"),
        (lambda m: m.generate(["w10"], temperature=-1.0), "temperature"),
        (lambda m: m.logits([5, 6]), "tokens must have shape [B, T], got [2]"),
        (lambda m: m.logits([[5, 6], [7]]), "tokens must be a rectangle"),
        (lambda m: m.logits([[5, 6]], [3]), "lengths must be 1 whole numbers from 1 to 2"),
        (lambda m: m.logits([[5, 6]], [1.5]), "lengths must be 1 whole numbers from 1 to 2"),
        (lambda m: m.logits([[5] * 65]), "text 0 has 65 tokens, the model has 64 positions"),
        (lambda m: m.score(["w10"]), "is a language model, it gives no scores"),
    ],
)
def test_what_cannot_be_done_is_explained(llama, call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(llama)


def test_a_reward_model_gives_only_scores(scorer) -> None:
    with pytest.raises(ValueError, match="is a reward model, it gives no logits: use score"):
        scorer.logits([[1, 2]])
    with pytest.raises(ValueError, match="is a reward model, it gives no answers"):
        scorer.generate(["w10"])


def test_models_that_cannot_be_loaded_are_explained(directory_of) -> None:
    with pytest.raises(ValueError, match="there is no model 'no-such/model'"):
        rlhf_jax.load("no-such/model")
    with pytest.raises(ValueError, match="dtype='float16' is not supported"):
        rlhf_jax.load("quickstart", dtype="float16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="asks for 16 devices, 8 are visible"):
        rlhf_jax.load("quickstart", mesh="16x1")


def test_a_real_model_tells_its_published_story(shared_data) -> None:
    directory = shared_data("stories260K-hf")
    golden = json.loads((directory / "golden.json").read_text())
    model = rlhf_jax.load(directory, mesh="1x1")
    want = golden["greedy_ids_from_bos_200"]
    (story,) = model.generate([want[:1]], max_new_tokens=len(want) - 1, temperature=0.0)
    assert story.tokens == want[1:]
    assert golden["greedy_text_llama2c_expected_stdout"].startswith(story.text.strip()[:300])
