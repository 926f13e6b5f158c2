"""What scores the answers of step 3, and what its critic starts from."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_jax.data.fields import UnusableRowError
from rlhf_jax.data.render import ChatFormat, Renderer
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.hf.pretrained import Pretrained, find_pretrained
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.retokenized import TextWriter, example
from rlhf_jax.stages.reward_functions import (
    RewardFunction,
    check_columns,
    load_reward_functions,
)
from rlhf_jax.stages.statistics_file import read_statistics


@dataclass(frozen=True)
class RewardPlan:
    """Models and functions by what they do.

    Attributes:
        functions: reward functions, in the order of --ppo.reward-fn.
        reward: the reward model, None where functions score alone.
        by_text: the reward model has other tokens than the actor, or where the critic does not
            start from it another chat template, and reads answers as text.
        critic: what the critic starts from.
    """

    functions: tuple[RewardFunction, ...]
    reward: Pretrained | None
    by_text: bool
    critic: Pretrained

    def __str__(self) -> str:
        scorers = [f"{f.weight:g} x {f.name}" for f in self.functions]
        if self.reward is not None:
            reads = "re-tokenised text" if self.by_text else "the actor's token ids"
            scorers = [f"the reward model {self.reward.name}, which reads {reads}", *scorers]
        return f"scored by {', '.join(scorers)}; the critic starts from {self.critic.name}"


def plan_rewards(cfg: PPOConfig, actor: Pretrained, reward: Pretrained | None) -> RewardPlan:
    """`reward` is None where --ppo.reward-model-weight is 0.

    Raises:
        ValueError: a function cannot be loaded, or the reward model can read neither the actor's
            ids nor its answers as text.
    """
    functions = load_reward_functions(cfg.reward_fn, cfg.reward_fn_weights)
    from_actor = cfg.critic_from == "actor" or reward is None
    critic = find_pretrained(actor.name, scalar=True) if from_actor else reward
    assert critic is not None
    difference = None if reward is None else token_difference(actor, reward)
    if difference is not None and not from_actor:
        raise ValueError(
            f"{difference}: use models of one family, or --ppo.critic-from=actor: the reward "
            "model then reads the answers as text, tokenised anew"
        )
    by_text = difference is not None or (from_actor and has_other_template(reward, actor))
    return RewardPlan(functions, reward, by_text, critic)


def has_other_template(reward: Pretrained | None, actor: Pretrained) -> bool:
    """Whether a reward model has a chat template of its own."""
    template = None if reward is None else reward.tokenizer.chat_template
    return bool(template) and template != actor.tokenizer.chat_template


def score_statistics(cfg: PPOConfig, reward: Pretrained | None) -> tuple[float, float]:
    """Mean and deviation that take a reward model's scores to standard units."""
    if reward is None or not cfg.standardize_score:
        return 0.0, 1.0
    try:
        return read_statistics(reward)
    except ValueError as error:
        if not cfg.reward_fn:
            raise
        alone = "or let the functions score alone with --ppo.reward-model-weight=0"
        raise ValueError(f"{error}, {alone}") from error


def check_prompt_rows(
    plan: RewardPlan, actor: Pretrained, rows: Sequence[PromptRow], chat_format: ChatFormat
) -> None:
    """ValueError where functions do not take the data's columns, or the reward model cannot read
    its conversations.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    check_columns(plan.functions, list(names))
    if plan.reward is None:
        return
    if plan.by_text:
        TextWriter.of(plan.reward, chat_format, score_eos=True)
    conversations = [row for row in rows if row.messages is not None]
    if plan.by_text or has_other_template(plan.reward, actor):
        check_conversations(plan, plan.reward, actor, conversations, chat_format)


def check_conversations(
    plan: RewardPlan,
    reward: Pretrained,
    actor: Pretrained,
    rows: Sequence[PromptRow],
    chat_format: ChatFormat,
) -> None:
    """ValueError where the reward model's chat template refuses a conversation, or writes it in
    another way than the actor's, while the model reads the actor's token ids.
    """
    renderer, actors = (Renderer(model.tokenizer, chat_format) for model in (reward, actor))
    for row in rows:
        answered = example(row, "yes")
        try:
            written = renderer.record(answered, ("chosen",))
        except UnusableRowError as reason:
            raise ValueError(
                f"the reward model {reward.name} cannot read the prompt {row.prompt[:60]!r} "
                f"({reason}): use data without such turns, or --data.chat-format=human_assistant"
            ) from reason
        if not plan.by_text and written != actors.record(answered, ("chosen",)):
            raise ValueError(
                f"the actor ({actor.name}) and the reward model ({reward.name}) have the same "
                f"tokens and chat templates that write {row.prompt[:60]!r} in different ways: give "
                "both the same chat_template, use --data.chat-format=human_assistant, or "
                "--ppo.critic-from=actor: the reward model then reads text in its own template"
            )


def token_difference(actor: Pretrained, reward: Pretrained) -> str | None:
    """Why the reward model cannot read the actor's token ids; None where it can.

    What either one pads with is left out: it is never read, and exports choose it themselves.
    """
    pads = {str(model.tokenizer.pad_token) for model in (actor, reward)}
    ours, theirs = vocabulary(actor, without=pads), vocabulary(reward, without=pads)
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()))[:3]
        return (
            f"the actor ({actor.name}) and the reward model ({reward.name}) have different "
            f"tokenizers ({len(ours)} and {len(theirs)} tokens; differing for example in "
            f"{differing})"
        )
    if reward.cfg.vocab_size < actor.cfg.vocab_size:
        return (
            f"the actor ({actor.name}) can answer with any of {actor.cfg.vocab_size} tokens, the "
            f"reward model ({reward.name}) knows {reward.cfg.vocab_size}"
        )
    return None


def vocabulary(model: Pretrained, *, without: set[str]) -> dict[str, int]:
    """Token to id."""
    vocab = model.tokenizer.get_vocab()
    return {token: index for token, index in vocab.items() if token not in without}
