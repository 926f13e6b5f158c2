"""Two models answer the same prompts; a reward model says which answers it likes better."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlhf_jax.data.encoder import Encoder
from rlhf_jax.data.fields import UnusableRowError
from rlhf_jax.data.records import Example, Record
from rlhf_jax.data.render import Renderer
from rlhf_jax.evaluation.config import Compare
from rlhf_jax.evaluation.pairs import load_judge
from rlhf_jax.evaluation.reading import check_any, left_out, read_prompts
from rlhf_jax.evaluation.statistics import bootstrap, wins
from rlhf_jax.inference.answers import Generation
from rlhf_jax.inference.conversation import Turn
from rlhf_jax.inference.places import choose_form
from rlhf_jax.inference.session import Model, load

SIDES = ("baseline", "model")
LONGEST_ANSWER = 100
"""Tokens, where the models' positions allow it."""


def evaluate_compare(cfg: Compare) -> dict[str, Any]:
    """The report of two models on prompts.

    Raises:
        ValueError: a model of the wrong kind, or no prompt is left.
        FileNotFoundError: no such model or data.
    """
    prompts, read = read_prompts(cfg.prompts, cfg.max_rows)
    models = {side: load_policy(getattr(cfg, side), cfg) for side in SIDES}
    judge = load_judge(cfg.judge, cfg) if cfg.judge is not None else None
    readers = [*models.values(), *([judge] if judge else [])]
    given = len(prompts)
    prompts = [each for each in prompts if all(can_write(each, model) for model in readers)]
    check_any(prompts, "prompt", f"{read}; the chat templates refuse them all")
    refused = given - len(prompts)
    notes: list[str] = []
    asked = {side: list(encode(models[side], prompts, cfg, notes)) for side in SIDES}
    if cfg.max_new_tokens is None:
        rooms = [longest_answer(models[s].config.max_positions, asked[s]) for s in SIDES]
        cfg = replace(cfg, max_new_tokens=min(rooms))
    answers = {side: answer(models[side], asked[side], cfg) for side in SIDES}
    numbers = in_both(answers)
    check_any(
        numbers,
        "prompt",
        f"{read}; beside an answer of {cfg.max_new_tokens} tokens none fits into the "
        f"{min(model.config.max_positions for model in models.values())} positions: name shorter "
        "ones with --prompts, such as the training data",
    )
    lost = left_out(refused_by_a_chat_template=refused, over_length=len(prompts) - len(numbers))
    scores: dict[str, dict[int, float]] = {side: {} for side in SIDES}
    result: dict[str, Any] = {}
    if judge is not None:
        for side in SIDES:
            said = {n: (prompts[n], answers[side][n]) for n in numbers}
            scores[side] = judged(judge, models[side], said, cfg, notes)
        both = in_both(scores)
        check_any(both, "answer", f"{read}; all are too long for {judge.name}")
        lost |= left_out(over_length_of_judge=len(numbers) - len(both))
        first, second = (np.array([scores[side][n] for n in both]) for side in SIDES)
        result = {"judge": judge.name, "scores": verdict(first, second, cfg.seed)}
    equal = sum(answers["baseline"][n].text == answers["model"][n].text for n in numbers)
    return {
        "command": "compare",
        "prompts": read,
        "settings": asdict(cfg),
        "notes": list(dict.fromkeys(notes)),
        "rows": len(numbers),
        "left_out": lost,
        "equal_answers": equal,
        **{side: about(models[side], [answers[side][n] for n in numbers]) for side in SIDES},
        **result,
        "samples": [
            {"prompt": text_of(prompts[n], models["model"])}
            | {side: told(answers[side][n], scores[side].get(n)) for side in SIDES}
            for n in numbers
        ],
    }


def in_both(sides: dict[str, dict[int, Any]]) -> list[int]:
    """The numbers that both sides have."""
    return sorted(sides["baseline"].keys() & sides["model"].keys())


def load_policy(name: str, cfg: Compare) -> Model:
    """A language model; ValueError where it is a reward model."""
    model = load(name, mesh=cfg.mesh, dtype=cfg.dtype)
    if model.is_reward_model:
        raise ValueError(
            f"{model.name} is a reward model, it gives no answers: name a language model to "
            "compare, and a reward model as --judge"
        )
    return model


def longest_answer(positions: int, asked: Sequence[Sequence[int]]) -> int:
    """What a model's positions leave beside the longest of the prompts, at most `LONGEST_ANSWER`.
    Prompts that leave less than a quarter of the positions do not count.
    """
    least = max(min(LONGEST_ANSWER, positions // 4), 1)
    fitting = [len(ids) for ids in asked if len(ids) + least <= positions]
    return min(LONGEST_ANSWER, positions - max(fitting)) if fitting else least


def answer(model: Model, asked: Sequence[list[int]], cfg: Compare) -> dict[int, Generation]:
    """The answer to each prompt that leaves room for one, by the prompt's number."""
    longest, positions = cfg.max_new_tokens, model.config.max_positions
    assert longest is not None, "evaluate_compare chooses it"
    if longest >= positions:
        raise ValueError(
            f"--max-new-tokens={longest} leaves no room for a prompt in the {positions} positions "
            f"of {model.name}: lower it"
        )
    kept = [n for n, ids in enumerate(asked) if len(ids) + longest <= positions]
    given = model.generate(
        [asked[n] for n in kept],
        max_new_tokens=longest,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        repetition_penalty=cfg.repetition_penalty,
        seed=cfg.seed,
        batch_size=cfg.batch_size,
    )
    return dict(zip(kept, given, strict=True))


def encode(
    model: Model, prompts: Sequence[Example], cfg: Compare, notes: list[str]
) -> Iterator[list[int]]:
    """Each prompt as this model is asked: text in its form, messages by its template."""
    form = choose_form(model.tokenizer, model.name, cfg.turn_format)
    if form.note and any(isinstance(prompt, Record) for prompt in prompts):
        notes.append(form.note)
    encoder = Encoder(model.tokenizer)
    for prompt in prompts:
        if isinstance(prompt, Record):
            yield form.encode([Turn(prompt.prompt)], "")
        else:
            yield from encoder.prompts([written(prompt, model)])


def written(prompt: Example, model: Model) -> Record:
    """A prompt as text."""
    templated = model.tokenizer.chat_template
    return Renderer(model.tokenizer, "template" if templated else "human_assistant").record(
        prompt, ()
    )


def can_write(prompt: Example, model: Model) -> bool:
    """Whether the model's chat template has a place for all messages of a prompt."""
    try:
        written(prompt, model)
    except UnusableRowError:
        return False
    return True


def text_of(prompt: Example, model: Model) -> str:
    """A prompt as people read it."""
    if isinstance(prompt, Record):
        return prompt.prompt
    try:
        return Renderer(model.tokenizer, "human_assistant").record(prompt, ()).prompt
    except UnusableRowError:  # a transcript has no turn of a tool
        return "\n\n".join(f"{role}: {content}" for role, content in prompt.prompt)


def judged(
    judge: Model,
    model: Model,
    given: dict[int, tuple[Example, Generation]],
    cfg: Compare,
    notes: list[str],
) -> dict[int, float]:
    """The judge's score of each answer that it can read whole.

    It is asked in its own form. Answers are the very tokens where both have the same ones; else
    the text, with the judge's own end where the answer had one.
    """
    prompts = [prompt for prompt, _ in given.values()]
    answers = [each for _, each in given.values()]
    if same_tokens(model, judge):
        said = [each.tokens for each in answers]
    else:
        notes.append(
            f"{judge.name} has another tokenizer than {model.name}: it reads the answers as text"
        )
        encoder = Encoder(judge.tokenizer)
        # Behind any prompt an answer is encoded alike.
        texts = list(encoder.answers([each.text for each in answers], [Record("a")] * len(answers)))
        said = [
            [*ids, *[encoder.eos_id] * each.stopped]
            for ids, each in zip(texts, answers, strict=True)
        ]
    rows = [
        [*prompt, *ids]
        for prompt, ids in zip(encode(judge, prompts, cfg, notes), said, strict=True)
    ]
    kept = [n for n, row in enumerate(rows) if len(row) <= judge.config.max_positions]
    scores = judge.score([rows[n] for n in kept], batch_size=cfg.batch_size)
    numbers = list(given)
    return {numbers[n]: score for n, score in zip(kept, scores, strict=True)}


def same_tokens(model: Model, judge: Model) -> bool:
    """Whether ids of `model` mean the same to `judge`; what pads a row is never read."""
    pads = {str(each.tokenizer.pad_token) for each in (model, judge)}
    ours, theirs = (
        {token: index for token, index in each.tokenizer.get_vocab().items() if token not in pads}
        for each in (model, judge)
    )
    return ours == theirs and judge.config.vocab_size >= model.config.vocab_size


def verdict(baseline_N: np.ndarray, model_N: np.ndarray, seed: int) -> dict[str, Any]:
    """Who scores higher: ties count one half for each."""
    differences_N = model_N - baseline_N
    return {
        "answers": len(differences_N),
        "baseline_mean": float(baseline_N.mean()),
        "model_mean": float(model_N.mean()),
        "difference": asdict(bootstrap(differences_N, seed=seed)),
        "wins": int((differences_N > 0).sum()),
        "ties": int((differences_N == 0).sum()),
        "losses": int((differences_N < 0).sum()),
        "win_rate": asdict(bootstrap(wins(differences_N), seed=seed)),
    }


def about(model: Model, answers: Sequence[Generation]) -> dict[str, Any]:
    """A model's answers in figures."""
    return {
        "name": model.name,
        "mean_tokens": float(np.mean([len(each.tokens) for each in answers])),
        "ended": float(np.mean([each.stopped for each in answers])),
    }


def told(answer: Generation, score: float | None) -> dict[str, Any]:
    """An answer for the report."""
    facts = {"text": answer.text, "tokens": len(answer.tokens), "ended": answer.stopped}
    return facts if score is None else {**facts, "score": score}
