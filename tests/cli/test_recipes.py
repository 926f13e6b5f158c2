"""Recipes are complete, and chosen by name or by the model."""

import pytest

from rlhf_jax.cli import parse
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.objectives.experience import DEEPSPEED_CHAT
from rlhf_jax.recipes.catalog import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_by_name(name: str) -> None:
    assert parse([f"--recipe={name}"]) == RECIPES[name]()


def test_recipe_by_model() -> None:
    assert parse([]) == RECIPES["quickstart"]()
    assert parse(["--actor-model", QUICKSTART]) == RECIPES["quickstart"]()
    assert parse(["--actor-model=facebook/opt-1.3b"]) == RECIPES["opt"]()
    assert parse(["--step=2", "--reward-model=350m"]).reward == RECIPES["opt"]().reward


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean deepspeed-chat"):
        parse(["--recipe=deepspeed_chat"])
    with pytest.raises(ValueError, match="There are quickstart, opt"):
        parse(["--recipe=zzz"])


def test_quickstart_rows_reach_its_steps() -> None:
    """Enough epochs of the built-in rows for `max_steps`, and room for the longest row."""
    from rlhf_jax.data import world

    config = parse([])
    rows = len(world.load_records("train", "sft"))
    assert config.sft.max_steps is not None
    assert rows * config.sft.num_train_epochs >= config.sft.max_steps * config.sft.batch_size
    bos = eos = 1
    assert config.ppo.max_prompt_seq_len >= world.MAX_PROMPT_BYTES + bos
    assert config.ppo.max_answer_seq_len >= world.MAX_ANSWER_BYTES + eos
    longest = bos + world.MAX_PROMPT_BYTES + world.MAX_ANSWER_BYTES + eos
    assert config.sft.max_seq_len >= longest <= config.reward.max_seq_len


def test_deepspeed_chat_has_the_constants_of_its_ppo_trainer() -> None:
    ppo = parse(["--recipe=deepspeed-chat"]).ppo
    assert ppo.reward_settings == DEEPSPEED_CHAT
    assert (ppo.clip_range, ppo.value_clip_range) == (0.2, 0.2)
    assert not ppo.standardize_score
    assert ppo.old_logprobs == "train"
