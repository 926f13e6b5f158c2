"""What is streamed is what `generate` says, from two programs and a cache that lives on."""

import itertools
import json

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.inference.streaming import FED_AT_ONCE, TOKENS_A_CALL

SAMPLED = {"max_new_tokens": 20, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
FIRST = [1, 10, 11, 12]


@pytest.fixture(scope="module")
def sampled(llama):
    return llama.streamer(stop_ids=range(4, 9), **SAMPLED)


def generated(model, prompt, seed, **settings) -> rlhf_jax.Generation:
    (answer,) = model.generate([prompt], prompt_length=44, seed=seed, **settings)
    return answer


def test_tokens_and_text_are_those_of_generate_for_the_seed(llama, sampled) -> None:
    """Over turns: each prompt goes on behind the last answer, then one that shares nothing."""
    prompt, lengths = FIRST, set()
    for seed in range(4):
        want = generated(llama, prompt, seed, stop_ids=range(4, 9), **SAMPLED)
        chunks = list(sampled.tokens(prompt, seed=seed))
        assert list(itertools.chain(*chunks)) == want.tokens
        assert all(len(chunk) == TOKENS_A_CALL for chunk in chunks[:-1])
        assert "".join(sampled.answer(prompt, seed=seed)) == want.text
        lengths.add((len(prompt), len(want.tokens), want.stopped))
        prompt = [*prompt, *want.tokens, 30 + seed][-40:]
    assert len(lengths) == 4
    assert {stopped for *_, stopped in lengths} == {True, False}


def test_a_long_prompt_comes_in_pieces_and_nothing_compiles_again(shared_data) -> None:
    """One program reads, one answers; turns of every length, forgotten turns, stopped answers."""
    model = rlhf_jax.load(shared_data("stories260K-hf"), mesh="1x1")
    streamer = model.streamer(context=400, max_new_tokens=24, temperature=0.0)
    story = json.loads((shared_data("stories260K-hf") / "golden.json").read_text())
    told = story["greedy_ids_from_bos_200"]
    assert list(itertools.chain(*streamer.tokens(told[:2]))) == told[2:26]
    compiled = count_compilations()
    assert list(itertools.chain(*streamer.tokens(told[:150]))) == told[150:174]
    assert list(itertools.chain(*streamer.tokens(told[:170]))) == told[170:194]
    half = streamer.tokens(told[:90])
    assert next(half) == told[90:98]
    half.close()
    longest = (told[:1] + told[1:] * 2)[: streamer.room]
    assert len(longest) > 2 * FED_AT_ONCE
    assert len(list(streamer.tokens(longest))) == 3
    assert list(itertools.chain(*streamer.tokens(told[:99]))) == told[99:123]
    assert compiled() == 0


def count_compilations():
    """A function that says how many programs XLA compiled since."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return lambda: len(names)


def test_the_counter_counts() -> None:
    compiled = count_compilations()
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compiled() == 1


def test_a_stopped_answer_leaves_a_cache_that_goes_on(llama, sampled) -> None:
    half = sampled.tokens(FIRST, seed=2)
    begun = next(half)
    half.close()
    prompt = [*FIRST, *begun[:5], 40]
    want = generated(llama, prompt, 3, stop_ids=range(4, 9), **SAMPLED)
    assert list(itertools.chain(*sampled.tokens(prompt, seed=3))) == want.tokens


def test_a_mesh_changes_nothing(llama, directory_of) -> None:
    """Eight devices: rows that only fill the mesh, and weights gathered for decoding."""
    spread = rlhf_jax.load(directory_of("llama"))
    assert spread.mesh.size == 8
    assert spread.mesh.shape["data"] > 1
    settings = {"max_new_tokens": 12, "temperature": 0.7, "stop_ids": []}
    streamer = spread.streamer(context=40, **settings)
    for prompt in (FIRST, [*FIRST, 50, 51]):
        want = generated(llama, prompt, 5, **settings)
        assert list(itertools.chain(*streamer.tokens(prompt, seed=5))) == want.tokens


def test_what_does_not_fit_is_explained(llama, scorer, sampled) -> None:
    with pytest.raises(ValueError, match="has 45 tokens, it must have 1 to 44"):
        next(sampled.tokens([5] * 45))
    with pytest.raises(ValueError, match="got the text 'w10 w11', a streamer takes token ids"):
        sampled.answer("w10 w11")
    with pytest.raises(ValueError, match="the prompt has token id 90, the model's vocabulary is"):
        sampled.answer([1, 90])
    with pytest.raises(ValueError, match="context=64 must hold a prompt beside max_new_tokens=64"):
        llama.streamer(max_new_tokens=64)
    with pytest.raises(ValueError, match="is a reward model, it gives no answers"):
        scorer.streamer()
