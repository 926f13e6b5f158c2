"""Recipes are complete, and chosen by name or by the model."""

from dataclasses import replace

import pytest

from rlhf_jax.cli import parse
from rlhf_jax.cli.parse import resolve
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.objectives.experience import DEEPSPEED_CHAT
from rlhf_jax.recipes.catalog import BY_DEPLOYMENT, RECIPES, make_recipe
from rlhf_jax.recipes.deepspeed_chat import with_deepspeed_rules
from rlhf_jax.recipes.opt import Deployment


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
    with pytest.raises(ValueError, match="there are quickstart, opt"):
        parse(["--recipe=zzz"])


@pytest.mark.parametrize(
    ("deployment", "size"), [(d, s) for d, table in BY_DEPLOYMENT.items() for s in table]
)
def test_deployment_and_actor_pick_the_recipe(deployment: Deployment, size: str) -> None:
    """The recipe of that size, under its own rules or DeepSpeed-Chat's."""
    recipe = make_recipe(BY_DEPLOYMENT[deployment][size])
    flags = [f"--deployment-type={deployment}", f"--actor-model={size}"]
    assert parse(flags) == recipe
    assert recipe.actor_model == size
    ruled = parse([*flags, "--recipe=deepspeed-chat"])
    assert ruled == with_deepspeed_rules(recipe)
    assert ruled.ppo.actor_lora == recipe.ppo.actor_lora
    assert ruled.reward.span == "divergence"


def test_a_short_size_picks_too_and_flags_come_on_top() -> None:
    config = parse(
        ["--deployment-type", "single_node", "--actor-model", "13b", "--ppo.batch-size", "64"]
    )
    expected = make_recipe("opt-13b-single-node")
    assert config == replace(expected, ppo=replace(expected.ppo, batch_size=64))


@pytest.mark.parametrize(
    ("deployment", "actor", "recipe"),
    [
        ("single_gpu", "125m", "opt-1.3b-single-gpu"),
        ("single_gpu", "13b", "opt-6.7b-single-gpu"),
        ("single_node", "66b", "opt-30b-single-node"),
        ("single_node", "meta-llama/Llama-2-13b-hf", "llama-2-7b"),
        ("multi_node", "1.3b", "opt-30b-multi-node"),
        ("single_node", "./mine", "opt-1.3b-single-node"),
    ],
)
def test_a_size_without_settings_takes_the_nearest_and_says_so(deployment, actor, recipe) -> None:
    config, notes = resolve([f"--deployment-type={deployment}", f"--actor-model={actor}"])
    assert config.ppo == make_recipe(recipe).ppo
    assert any(f"the recipe {recipe}'s" in note for note in notes)
    assert any("facebook/opt-" in note for note in notes)


def test_another_recipe_that_is_named_stays() -> None:
    flags = ["--recipe=llama-2-7b-lora", "--deployment-type=single_node", "--actor-model=13b"]
    assert parse(flags).ppo == make_recipe("llama-2-7b-lora").ppo
    assert parse(["--deployment-type=single_gpu"]) == replace(RECIPES["quickstart"](), mesh="1x1")


@pytest.mark.parametrize(
    ("recipe", "stage", "per_device", "devices", "parts"),
    [
        ("opt-1.3b-single-gpu", "sft", 16, 1, 8),
        ("opt-1.3b-single-gpu", "reward", 16, 1, 4),
        ("opt-1.3b-single-gpu", "ppo", 16, 1, 2),
        ("opt-6.7b-single-node", "sft", 6, 8, 1),
        ("opt-13b-single-node", "ppo", 16, 8, 1),
        ("opt-66b-multi-node", "reward", 2, 64, 1),
        ("opt-66b-multi-node", "ppo", 4, 64, 1),
        ("llama-2-7b", "reward", 8, 8, 1),
        ("llama-2-7b", "ppo", 1, 8, 1),
    ],
)
def test_batches_are_those_of_the_scripts_over_all_devices(
    recipe: str, stage: str, per_device: int, devices: int, parts: int
) -> None:
    """DeepSpeed's train_batch_size, from the numbers in the scripts."""
    cfg = getattr(make_recipe(recipe), stage)
    assert (cfg.batch_size, cfg.gradient_accumulation_steps) == (
        per_device * devices * parts,
        parts,
    )


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
