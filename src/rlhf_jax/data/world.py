"""The quickstart's world: text, preferences and truth, made in code, the same on every machine.

A prompt asks for something to be done to a short word; the right answer is one string.

    Human: reverse dkfa Assistant: afkd
    Human: shouted dkfa Assistant: DKFA

Words have 4 distinct letters out of 16. Of 2000 words 300 are held out: they never occur in a
training prompt, so the evaluation asks for the skill, not for memory. No word is another one
reversed. There are six tasks with two phrasings each. Every prompt has the same length: what a
position holds is then the same in all of them, which two small layers learn in a minute or two.

What the three stages see (`load_records(split, stage)`):

- `"sft"`: demonstrations of mixed quality: 50 % right, 10 % wrong, 40 % unhelpful ("sorry").
  A model that imitates them well gives a right answer half of the time.
- `"reward"`: pairs whose chosen answer is right and whose rejected one is wrong (75 %) or
  unhelpful (25 %).
- `"ppo"`: prompts alone. Nothing there tells the right answer: the reward is the reward model's.

A wrong answer is a careless person's: another task's, another word's, or one letter changed.
`judge` knows the truth; it measures a run, and the truth also writes the data above. It is never
a reward.

What to expect: PPO drops the unhelpful answers, so the share of right answers sampled at
temperature 1 rises far. The greedy share rises too where the imitator was unsure of the skill
and its most likely answer was to decline.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from rlhf_jax.data.records import Record

type Split = Literal["train", "eval"]
type Stage = Literal["sft", "reward", "ppo"]
type Verdict = Literal["right", "wrong", "unhelpful"]

LETTERS = "abdefgiklmnoprtu"
NUM_TRAIN_WORDS = 1700
NUM_EVAL_WORDS = 300
MAX_PROMPT_BYTES = 30
MAX_ANSWER_BYTES = 10

UNHELPFUL = ("sorry", "sorry, no", "so sorry")
"""They begin alike, and with a letter that no word has."""

TASKS: dict[str, tuple[Callable[[str], str], tuple[str, str]]] = {
    "reverse": (lambda word: word[::-1], ("reverse", "flipped")),
    "upper": (str.upper, ("capital", "shouted")),
    "repeat": (lambda word: f"{word} {word}", ("doubled", "twofold")),
    "swap": (lambda word: word[2:] + word[:2], ("swapped", "rotated")),
    "first": (lambda word: word[0], ("initial", "leading")),
    "last": (lambda word: word[-1], ("closing", "last of")),
}
"""A task's name: what it does to a word, and how people ask for it."""

_TASK_OF_PHRASE = {phrase: task for task, (_, phrases) in TASKS.items() for phrase in phrases}


def load_records(split: Split, stage: Stage) -> list[Record]:
    """The records of one stage. See the module's docstring for what each holds."""
    match stage:
        case "sft":
            return sft_records(split)
        case "reward":
            return preference_records(split)
        case "ppo":
            return prompt_records(split)
    raise ValueError(
        f"stage {stage!r} has no records in the quickstart world: use sft, reward, ppo"
    )


def prompt_records(split: Split) -> list[Record]:
    """20400 training or 3600 evaluation prompts, each once.

    Any number of them divisible by 12, taken from the front, holds each task and phrasing equally
    often, and the first 300 (1700) hold each word once.
    """
    return [Record(prompt=prompt) for prompt in _prompts(split)]


def sft_records(split: Split) -> list[Record]:
    """Two independent demonstrations a prompt: 50 % right, 10 % wrong, 40 % unhelpful."""
    rng = random.Random(f"demonstrations/{split}")

    def demonstrate(prompt: str) -> str:
        draw = rng.random()
        if draw < 0.5:
            return right_answer(prompt)
        return _wrong_answer(prompt, rng) if draw < 0.6 else rng.choice(UNHELPFUL)

    prompts = _prompts(split)
    return [
        Record(prompt, chosen=f" {demonstrate(prompt)}") for _ in range(2) for prompt in prompts
    ]


def preference_records(split: Split) -> list[Record]:
    """A pair for each prompt: right is chosen over wrong (75 %) or unhelpful (25 %)."""
    rng = random.Random(f"preferences/{split}")

    def pair(prompt: str) -> Record:
        bad = _wrong_answer(prompt, rng) if rng.random() < 0.75 else rng.choice(UNHELPFUL)
        return Record(prompt, chosen=f" {right_answer(prompt)}", rejected=f" {bad}")

    return [pair(prompt) for prompt in _prompts(split)]


def judge(prompt: str, answer: str) -> Verdict:
    """The truth about `answer`; spaces around it do not matter, and silence is unhelpful."""
    said = answer.strip()
    if said == right_answer(prompt):
        return "right"
    return "unhelpful" if said in UNHELPFUL or not said else "wrong"


def task_of(prompt: str) -> str:
    """The key in `TASKS` of what a prompt asks for."""
    return _parse(prompt)[0]


def right_answer(prompt: str) -> str:
    """What the judge accepts."""
    task, word = _parse(prompt)
    return TASKS[task][0](word)


@cache
def words(split: Split) -> tuple[str, ...]:
    """1700 training or 300 held-out words; no word, nor its reverse, is in both."""
    rng = random.Random("words")
    chosen: dict[str, None] = {}
    while len(chosen) < NUM_TRAIN_WORDS + NUM_EVAL_WORDS:
        word = "".join(rng.sample(LETTERS, 4))
        if word[::-1] not in chosen:
            chosen[word] = None
    ordered = tuple(chosen)
    return ordered[:NUM_TRAIN_WORDS] if split == "train" else ordered[NUM_TRAIN_WORDS:]


@cache
def _prompts(split: Split) -> tuple[str, ...]:
    return tuple(_each_prompt(words(split)))


def _each_prompt(of_words: tuple[str, ...]) -> Iterator[str]:
    """Every word with every phrasing; neighbours ask for different tasks about different words."""
    phrases = [TASKS[task][1][n] for n in range(2) for task in TASKS]
    for shift in range(len(phrases)):
        for n, word in enumerate(of_words):
            yield f"Human: {phrases[(n + shift) % len(phrases)]} {word} Assistant:"


def _parse(prompt: str) -> tuple[str, str]:
    """(task, word) of a prompt."""
    body = prompt.strip().removeprefix("Human: ").removesuffix(" Assistant:")
    phrase, _, word = body.rpartition(" ")
    if phrase not in _TASK_OF_PHRASE:
        raise ValueError(
            f"{prompt!r} is not a quickstart prompt: write 'Human: PHRASE WORD Assistant:'"
            f" with a phrase out of {', '.join(_TASK_OF_PHRASE)}"
        )
    return _TASK_OF_PHRASE[phrase], word


def _wrong_answer(prompt: str, rng: random.Random) -> str:
    """Another task's answer, another word's, or one letter changed; never the right one."""
    task, word = _parse(prompt)
    right = right_answer(prompt)
    while True:
        match rng.randrange(3):
            case 0:
                answer = TASKS[rng.choice(list(TASKS))][0](word)
            case 1:
                answer = TASKS[task][0](rng.choice(words("train")))
            case _:
                answer = _change_one_letter(right, rng)
        if answer != right:
            return answer


def _change_one_letter(text: str, rng: random.Random) -> str:
    """A letter of `text` replaced by another one, as large or small as it was."""
    place = rng.choice([n for n, letter in enumerate(text) if letter != " "])
    letters = LETTERS.upper() if text[place].isupper() else LETTERS
    new = rng.choice([letter for letter in letters if letter != text[place]])
    return text[:place] + new + text[place + 1 :]
