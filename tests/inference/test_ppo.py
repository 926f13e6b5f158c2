"""PPO from Python: what a step scores, what it moves, and that it learns; on golden models."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pandas
import pytest

import rlhf_jax
from rlhf_jax.inference.ppo import column_of
from rlhf_jax.models.lora import LoRAConfig

CONFIG = rlhf_jax.PPOConfig(
    batch_size=8,
    max_prompt_seq_len=8,
    max_answer_seq_len=6,
    actor_learning_rate=3e-2,
    critic_learning_rate=1e-2,
    lr_scheduler_type="constant",
    num_warmup_steps=0,
    standardize_score=False,
    kl_coef=0.02,
    remat="none",
)
PROMPTS = [f"w{n} w{n + 1}" for n in range(10, 17)]
STEPS = 12
MEAN, STD = 0.25, 2.0


def on_host(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Judge:
    """Scores an answer by the share of its tokens below 45; keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, completion_ids: Any, **rest: Any) -> list[float]:
        self.seen.append({"completion_ids": completion_ids, **rest})
        return [float(np.mean(np.array(ids) < 45)) for ids in completion_ids]


@pytest.fixture(scope="module", params=["1x1", "4x2"])
def learned(request, directory_of) -> dict[str, Any]:
    """Some steps against `Judge`."""
    policy = rlhf_jax.load(directory_of("llama"), mesh=request.param)
    before, judge = on_host(policy.params), Judge()
    ppo = rlhf_jax.PPO(policy, judge, CONFIG)
    metrics = [ppo.step(PROMPTS, level=list(range(7))) for _ in range(STEPS)]
    return {"ppo": ppo, "policy": policy, "before": before, "judge": judge, "metrics": metrics}


def test_the_function_is_shown_real_rows_and_its_mean_is_the_score(learned) -> None:
    """Seven prompts in a batch of eight: the filler row is neither shown nor counted."""
    (first, *_), scored = learned["judge"].seen, learned["metrics"][0]
    assert first["prompts"] == PROMPTS
    assert first["level"] == list(range(7))
    mean = np.mean([np.mean(np.array(ids) < 45) for ids in first["completion_ids"]])
    assert scored["objective/scores"] == pytest.approx(mean, rel=1e-6)
    assert scored["rewards/Judge/mean"] == pytest.approx(mean, rel=1e-6)
    lengths = [len(ids) for ids in first["completion_ids"]]
    assert scored["response_length/mean"] == pytest.approx(np.mean(lengths), rel=1e-6)


def test_slots_change_no_metric(learned, directory_of) -> None:
    """Four rows of seven decode at once: the same answers, scores and losses."""
    mesh = "1x1" if learned["policy"].mesh.size == 1 else "4x2"
    policy = rlhf_jax.load(directory_of("llama"), mesh=mesh)
    ppo = rlhf_jax.PPO(policy, Judge(), replace(CONFIG, rollout_slots=4))
    metrics = ppo.step(PROMPTS, level=list(range(7)))
    assert metrics == pytest.approx(learned["metrics"][0], rel=1e-4, abs=1e-6)


def test_packing_changes_no_metric(learned, directory_of) -> None:
    """Two steps, the second from what the first one wrote; and it says what it saved."""
    mesh = "1x1" if learned["policy"].mesh.size == 1 else "4x2"
    policy = rlhf_jax.load(directory_of("llama"), mesh=mesh)
    ppo = rlhf_jax.PPO(policy, Judge(), replace(CONFIG, packing=True))
    for expected in learned["metrics"][:2]:
        metrics = ppo.step(PROMPTS, level=list(range(7)))
        saved = [metrics.pop(f"perf/{name}_tokens_saved") for name in ("score", "update")]
        assert min(saved) > 0.1
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_policy_learns_what_the_function_rewards(learned) -> None:
    """By its own samples afterwards, not only by the metrics of training. Seeds 0 to 19 do."""
    scores = [row["objective/scores"] for row in learned["metrics"]]
    assert np.mean(scores[:2]) < 0.75
    assert np.mean(scores[-3:]) > 0.7
    answers = learned["policy"].generate(PROMPTS, max_new_tokens=6, num_samples=4, seed=9)
    share = np.mean([np.mean(np.array(answer.tokens) < 45) for answer in answers])
    assert share > 0.7


def test_the_model_generates_from_the_buffers_that_the_update_wrote(learned) -> None:
    ppo, policy = learned["ppo"], learned["policy"]
    for mine, its in zip(
        jax.tree.leaves(policy.params), jax.tree.leaves(ppo.roles.actor.params), strict=True
    ):
        assert mine is its
    assert not same(on_host(policy.params), learned["before"])
    assert same(on_host(ppo.roles.reference), learned["before"])
    assert ppo.num_steps == int(ppo.roles.actor.step) == STEPS


def test_kl_starts_at_zero_and_the_sampler_agrees_with_the_training_graph(learned) -> None:
    metrics = learned["metrics"]
    assert abs(metrics[0]["objective/kl"]) < 1e-4
    assert metrics[-1]["objective/kl"] > 0.5
    assert max(row["rollout/logprob_diff_mean"] for row in metrics) < 1e-4


def test_a_reward_models_scores_are_its_own_in_units_of_its_training_answers(
    directory_of, tolerance
) -> None:
    """Greedy answers, so `generate` and `score` give them too; a rate of 0 moves the critic only,
    which is a copy of the reward model.
    """
    policy = rlhf_jax.load(directory_of("llama"), mesh="1x1")
    directory = directory_of("llama_scorer")
    (directory / "score_statistics.json").write_text(json.dumps({"mean": MEAN, "std": STD}))
    scorer = rlhf_jax.load(directory, mesh="1x1")
    config = replace(
        CONFIG, temperature=0.0, standardize_score=True, actor_learning_rate=0.0, score_clip=None
    )
    ppo = rlhf_jax.PPO(policy, scorer, config)
    before, judge = on_host(policy.params), on_host(scorer.params)
    assert same(on_host(ppo.roles.critic.params), judge)
    metrics = ppo.step(PROMPTS)
    assert same(on_host(policy.params), before)
    assert same(on_host(scorer.params), judge)
    assert not same(on_host(ppo.roles.critic.params), judge)
    answers = policy.generate(PROMPTS, temperature=0.0, max_new_tokens=6)
    prompts = [policy.tokenizer.encode(prompt) for prompt in PROMPTS]
    raw = scorer.score([p + a.tokens for p, a in zip(prompts, answers, strict=True)])
    expected = (np.mean(raw) - MEAN) / STD
    np.testing.assert_allclose(metrics["objective/scores"], expected, **tolerance(np.float32))


async def later(**columns: Any) -> list[float]:
    return []


def test_what_cannot_train_is_said_before_anything_compiles(directory_of, llama, scorer) -> None:
    adapters = replace(CONFIG, actor_lora=LoRAConfig(dim=4))
    elsewhere = rlhf_jax.load(directory_of("llama_scorer"), mesh="2x1")
    other_words = rlhf_jax.load("quickstart", mesh="1x1")
    cases: list[tuple[Any, Any, Any, str]] = [
        (llama, scorer, adapters, "PPO has no actor_lora"),
        (llama, scorer, replace(CONFIG, remat="auto"), "remat='auto' is chosen by the memory plan"),
        (llama, scorer, replace(CONFIG, lr_scheduler_type="cosine"), "falls until max_steps"),
        (llama, scorer, replace(CONFIG, max_prompt_seq_len=60), "make 66 tokens, .* 64 positions"),
        (
            llama,
            scorer,
            replace(CONFIG, standardize_score=True),
            "are with standardize_score=False$",
        ),
        (llama, llama, CONFIG, "is a language model, it gives no scores"),
        (llama, elsewhere, CONFIG, "on two meshes"),
        (scorer, scorer, CONFIG, "is a reward model: PPO trains a language model"),
        (
            "runs/x/actor",
            scorer,
            CONFIG,
            "the policy is 'runs/x/actor' .str.: pass what rlhf_jax.l",
        ),
        (llama, scorer, {"batch_size": 8}, "the config is {'batch_size': 8} .dict.: pass rlhf_jax"),
        (other_words, scorer, CONFIG, "different tokenizers"),
    ]
    for policy, reward, config, message in cases:
        with pytest.raises(ValueError, match=message):
            rlhf_jax.PPO(policy, reward, config)
    functions: list[tuple[Any, str]] = [
        ("my_rewards.py:score", "'my_rewards.py:score' .str.: pass a reward model or the function"),
        (None, "the reward is None"),
        (
            lambda completions: [0.0] * len(completions),
            "^the reward function <lambda> does not take prompts, completion_ids: .* in ..columns",
        ),
    ]
    functions.append((later, "the reward function later is async, and nothing awaits it"))
    for function, message in functions:
        with pytest.raises(ValueError, match=message):
            rlhf_jax.PPO(llama, function, CONFIG)
    wide = rlhf_jax.load(directory_of("llama"), mesh="4x1")
    with pytest.raises(ValueError, match="over 4 devices, the config gives parts of 2 rows"):
        rlhf_jax.PPO(wide, Judge(), replace(CONFIG, minibatch_size=2))


def test_columns_go_with_the_prompts_by_their_place(learned) -> None:
    """A pandas Series counts by its index, which a shuffled or filtered table keeps."""
    rows = pandas.DataFrame({"prompt": PROMPTS, "level": range(7)}, index=range(7)[::-1])
    learned["ppo"].step(rows["prompt"], level=rows["level"])
    assert learned["judge"].seen[-1]["prompts"] == PROMPTS
    assert learned["judge"].seen[-1]["level"] == list(range(7))


class Places:
    """A sequence as Python has had them always: nothing says that it is iterable."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> int:
        return range(5, 7)[place]


def test_a_column_is_anything_with_values_in_an_order() -> None:
    columns: list[Any] = [Places(), np.arange(5, 7), jax.numpy.arange(5, 7), (5, 6)]
    assert [column_of("level", values, 2) for values in columns] == [[5, 6]] * 4
    refused: list[Any] = [np.array(5), jax.numpy.int32(5), {5, 6}, {5: 6, 6: 7}, None]
    for values in refused:
        with pytest.raises(ValueError, match="^column level is .*: give a list, one value"):
            column_of("level", values, 2)


def test_prompts_that_do_not_fit_a_step_are_refused(learned) -> None:
    step, steps = learned["ppo"].step, learned["ppo"].num_steps
    with pytest.raises(ValueError, match="got 9 prompts, batch_size=8"):
        step(["w5"] * 9)
    with pytest.raises(ValueError, match="got 0 prompts"):
        step([])
    with pytest.raises(ValueError, match="prompt 1 has 10 tokens, max_prompt_seq_len=8"):
        step(["w5", "w5 " * 9])
    with pytest.raises(ValueError, match="column level has 1 values for 2 prompts"):
        step(["w5", "w6"], level=[1])
    with pytest.raises(ValueError, match="column level is 'ab' .str.: give a list, one value"):
        step(["w5", "w6"], level="ab")
    with pytest.raises(ValueError, match="column level is 5 .int.: give a list"):
        step(["w5", "w6"], level=5)
    with pytest.raises(ValueError, match="reward functions get completions from the step"):
        step(["w5", "w6"], completions=["w7", "w8"])
    with pytest.raises(ValueError, match="got a generator where a list of texts is wanted"):
        step(text for text in PROMPTS)
    assert learned["ppo"].num_steps == steps
