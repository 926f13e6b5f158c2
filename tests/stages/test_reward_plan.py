"""What scores answers, and what the critic starts from, as it follows from tokenizers and flags."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_jax.data.records import Message
from rlhf_jax.data.render import ChatFormat
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.reward_plan import (
    check_prompt_rows,
    plan_rewards,
    score_statistics,
    token_difference,
)
from tests.stages.test_retokenized import words_tokenizer

GSM8K = "rlhf_jax.rewards.gsm8k:gsm8k_correct"


@pytest.fixture(scope="module")
def actor() -> Pretrained:
    return find_pretrained("quickstart")


@pytest.fixture(scope="module")
def words(actor: Pretrained) -> Pretrained:
    """A reward model that reads words, where the actor reads bytes."""
    cfg = replace(actor.cfg, vocab_size=40, max_positions=512)
    return Pretrained("words", cfg, words_tokenizer(), None, None)


def test_with_equal_tokens_the_reward_model_reads_ids_and_starts_the_critic(
    actor: Pretrained,
) -> None:
    reward = replace(actor, name="reward")
    plan = plan_rewards(PPOConfig(), actor, reward)
    assert (plan.by_text, plan.critic, plan.reward) == (False, reward, reward)
    assert str(plan) == (
        "scored by the reward model reward, which reads the actor's token ids; "
        "the critic starts from reward"
    )
    from_actor = plan_rewards(PPOConfig(critic_from="actor"), actor, reward)
    assert (from_actor.by_text, from_actor.critic.name) == (False, "quickstart")


def test_what_either_one_pads_with_does_not_matter(actor: Pretrained) -> None:
    tokenizer = find_pretrained("quickstart").tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    assert token_difference(actor, replace(actor, tokenizer=tokenizer)) is None


def test_with_other_tokens_it_reads_text_where_the_critic_starts_from_the_actor(
    actor: Pretrained, words: Pretrained
) -> None:
    plan = plan_rewards(PPOConfig(critic_from="actor"), actor, words)
    assert (plan.by_text, plan.critic.name) == (True, "quickstart")
    assert "words, which reads re-tokenised text; the critic starts from quickstart" in str(plan)
    message = r"different tokenizers \(258 and .* --ppo.critic-from=actor: the reward model then"
    with pytest.raises(ValueError, match=message):
        plan_rewards(PPOConfig(), actor, words)


def test_with_fewer_embedding_rows_it_cannot_read_ids(actor: Pretrained) -> None:
    small = replace(actor, name="small", cfg=replace(actor.cfg, vocab_size=200))
    with pytest.raises(ValueError, match="any of 264 tokens, the reward model .small. knows 200"):
        plan_rewards(PPOConfig(), actor, small)
    assert plan_rewards(PPOConfig(critic_from="actor"), actor, small).by_text


def test_functions_alone_need_no_model(actor: Pretrained) -> None:
    cfg = PPOConfig(reward_fn=(GSM8K,), reward_fn_weights=(2.0,), reward_model_weight=0)
    plan = plan_rewards(cfg, actor, None)
    assert plan.reward is None
    assert str(plan) == "scored by 2 x gsm8k_correct; the critic starts from quickstart"
    assert score_statistics(cfg, None) == (0.0, 1.0)


def test_a_reward_model_without_statistics_could_be_left_out(actor: Pretrained) -> None:
    with pytest.raises(ValueError, match="score alone with --ppo.reward-model-weight=0"):
        score_statistics(PPOConfig(reward_fn=(GSM8K,)), actor)
    with pytest.raises(ValueError, match="--ppo.no-standardize-score$"):
        score_statistics(PPOConfig(), actor)
    assert score_statistics(PPOConfig(standardize_score=False), actor) == (0.0, 1.0)


def rows(**extra: Any) -> list[PromptRow]:
    return [PromptRow(np.array([1], np.int32), 0, "2 ?", **extra)]


def test_the_data_are_checked_before_the_run(actor: Pretrained, words: Pretrained) -> None:
    functions = plan_rewards(PPOConfig(reward_fn=(GSM8K,)), actor, replace(actor, name="r"))
    check_prompt_rows(functions, actor, rows(columns={"answer": "#### 2"}), "template")
    with pytest.raises(ValueError, match="needs answer, which the prompts' data set does not"):
        check_prompt_rows(functions, actor, rows(), "template")
    by_text = plan_rewards(PPOConfig(critic_from="actor"), actor, words)
    check_prompt_rows(by_text, actor, rows(), "template")
    asked = rows(messages=(Message("user", "2 ?"),))
    check_prompt_rows(by_text, actor, asked, "human_assistant")
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        check_prompt_rows(by_text, actor, asked, "template")


def with_template(model: Pretrained, template: str | None) -> Pretrained:
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = template
    return replace(model, name="reward", tokenizer=tokenizer)


PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
MARKED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_a_reward_model_that_reads_the_actors_ids_has_its_way_to_write_conversations(
    actor: Pretrained,
) -> None:
    asked = rows(messages=(Message("user", "2 ?"),))
    actor = replace(with_template(actor, PLAIN), name=actor.name)
    cases: list[tuple[str | None, list[PromptRow], ChatFormat]] = [
        (PLAIN, asked, "template"),
        (PLAIN + "{# the same text #}", asked, "template"),
        (None, asked, "template"),
        (MARKED, rows(), "template"),
        (MARKED, asked, "human_assistant"),
    ]
    for template, data, chat_format in cases:
        plan = plan_rewards(PPOConfig(), actor, with_template(actor, template))
        check_prompt_rows(plan, actor, data, chat_format)
    plan = plan_rewards(PPOConfig(), actor, with_template(actor, MARKED))
    with pytest.raises(ValueError, match="same tokens and chat templates that write '2 .' in diff"):
        check_prompt_rows(plan, actor, asked, "template")
    assert not plan.by_text
    plan = plan_rewards(PPOConfig(critic_from="actor"), actor, with_template(actor, MARKED))
    assert plan.by_text, "it reads text in its own template"
    check_prompt_rows(plan, actor, asked, "template")
    plan = plan_rewards(PPOConfig(critic_from="actor"), actor, with_template(actor, PLAIN))
    assert not plan.by_text


def test_every_conversation_is_one_that_the_reward_models_template_takes(
    actor: Pretrained, words: Pretrained
) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    reward = with_template(words, refuses + MARKED)
    plan = plan_rewards(PPOConfig(critic_from="actor"), actor, reward)
    asked = (Message("user", "2 ?"),)
    check_prompt_rows(plan, actor, rows(messages=asked), "template")
    second = rows(messages=(Message("system", "Be kind."), *asked))
    message = r"the reward model reward cannot read the prompt '2 \?' \(.* no system\): use data"
    with pytest.raises(ValueError, match=message):
        check_prompt_rows(plan, actor, rows(messages=asked) + second, "template")
