"""Data sets that are known by name: how a row of each becomes a prompt and its answers.

One row of `CATALOG` is one data set. Those of DeepSpeed-Chat read as in its
`dschat/utils/data/raw_datasets.py`, whose markers are ` Human: … Assistant:`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from rlhf_jax.data.conversations import example_of
from rlhf_jax.data.fields import Field, Row, UnusableRowError, columns_of, fill, user
from rlhf_jax.data.records import Conversation, Example, Message, Stage, Text
from rlhf_jax.data.shapes import pair_of, split_pair, with_margin

type Numbered = Iterator[tuple[int, Row]]


@dataclass(frozen=True)
class Entry:
    """One data set.

    Attributes:
        name: a path that contains it is read so, as DeepSpeed-Chat chooses; or `NAME@PATH`.
        prompt: what is asked; None: what both answers begin with.
        chosen: the answer, or the first of two; None: there are prompts alone.
        rejected: the other answer; None: there are no pairs.
        first_is_better: whether the answer of `chosen` is; None from it: neither is.
        margin: by how much the scores should differ: the difference in the data, as a share of
            the largest there can be.
        keep: columns for reward functions; None: all but those that a row must have.
        columns: what a row must have, where functions read it.
        merge: several rows to one, before they are read.
        splits: names of the train and eval split that come before those of every data set.
        hub: its id on the Hub, where that is not the path.
        config: of the data set on the Hub, unless the path says one.
        data_dir: folder in the data set on the Hub.
        folder: where it lies where the path is its name.
    """

    name: str
    prompt: Field | None
    chosen: Field | None = None
    rejected: Field | None = None
    first_is_better: Callable[[Row], bool | None] | None = None
    margin: Callable[[Row], float] | None = None
    keep: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    merge: Callable[[Numbered], Numbered] | None = None
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hub: str | None = None
    config: str | None = None
    data_dir: str | None = None
    folder: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a row must have."""
        fields = (self.prompt, self.chosen, self.rejected)
        named = [name for each in fields if each is not None for name in columns_of(each)]
        return tuple(dict.fromkeys([*self.columns, *named])) if not self.merge else self.columns

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Which stages can use it."""
        if self.rejected is not None:
            return ("sft", "reward", "ppo")
        return ("sft", "ppo") if self.chosen is not None else ("ppo",)

    def convert(self, row: Row, where: str) -> Example | str:
        """The record of a row, or the reason why the row is dropped."""
        try:
            return self._record(row, where)
        except UnusableRowError as reason:
            return str(reason)

    def _record(self, row: Row, where: str) -> Example | str:
        texts: list[Text] = [
            fill(each, row, where) for each in (self.chosen, self.rejected) if each is not None
        ]
        if self.first_is_better is not None:
            better = self.first_is_better(row)
            if better is None:
                return "neither answer is better"
            texts = texts if better else texts[::-1]
        if self.prompt is None:
            record = split_pair(*texts)
        elif self.rejected is not None:
            record = pair_of(fill(self.prompt, row, where), *texts)
        else:
            record = example_of(fill(self.prompt, row, where), *texts)
        if self.margin is None or isinstance(record, str):
            return record
        return with_margin(record, self.margin(row), where)


def number(row: Row, *names: str) -> float:
    """A column that holds a number, or a field in it.

    Raises:
        UnusableRowError: it is null, not there, or no number.
    """
    value: object = row
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise UnusableRowError(f"no number {'.'.join(names)}") from error


def asked(name: str) -> str:
    """DeepSpeed-Chat's markers around a field."""
    return f" Human: {{{name}}} Assistant:"


def without_citations(name: str) -> Field:
    """WebGPT's answers cite their sources as `[1]`, which no browser is there to follow."""

    def answer(row: Row) -> Text:
        text = fill(f" {{{name}}}", row, name)
        assert isinstance(text, str)
        # The space in front of the answer is no part of it: a citation may begin the answer.
        cited = re.sub(r" [\(\[].*?[\)\]]", "", text[1:])
        return " " + re.sub(r"[\(\[].*?[\)\]]", "", cited)

    return answer


def behind_assistant(name: str) -> Field:
    """An answer that carries the marker, which belongs to the prompt here."""

    def answer(row: Row) -> Text:
        text = fill(f"{{{name}}}", row, name)
        if not isinstance(text, str) or not text.startswith("Assistant:"):
            raise UnusableRowError("no assistant turn")
        return text.removeprefix("Assistant:")

    return answer


def vicuna_prompt(row: Row) -> Text:
    """Vicuna's markers as DeepSpeed-Chat's."""
    text = fill("{prompt}", row, "prompt")
    if not isinstance(text, str) or not text:
        raise UnusableRowError("no prompt")
    return text.replace("USER", "Human").replace("ASSISTANT", "Assistant")


def helpsteer_turns(row: Row) -> Conversation:
    """HelpSteer's prompts: what the person says, then marked turns of both."""
    text = fill("{prompt}", row, "prompt")
    assert isinstance(text, str)
    first, *others = text.split("<extra_id_1>")
    turns = [other.partition("\n")[::2] for other in others]
    messages = [Message("user", first.rstrip("\n") if others else first)]
    messages += [Message(role.strip().lower(), said.rstrip("\n")) for role, said in turns]
    # The last mark only says who is to answer.
    return tuple(messages[:-1] if messages[-1] == ("assistant", "") else messages)


_TURN = re.compile(r"\n\n(Human|Assistant):")


def transcript(name: str) -> Field:
    """A transcript of Anthropic's HH-RLHF as messages, so that a chat template writes it."""

    def turns(row: Row) -> Conversation:
        text = fill(f"{{{name}}}", row, name)
        if not isinstance(text, str):
            raise UnusableRowError("no transcript")
        before, *parts = _TURN.split(text)
        if before.strip() or not parts:
            raise UnusableRowError("no transcript")
        speakers, said = parts[::2], parts[1::2]
        roles = {"Human": "user", "Assistant": "assistant"}
        return tuple(
            Message(roles[who], words.strip()) for who, words in zip(speakers, said, strict=True)
        )

    return turns


def best_and_worst(*scores: str) -> Callable[[Numbered], Numbered]:
    """Rows of one prompt that follow each other become one, with the `best` and the `worst`.

    Later scores decide where earlier ones are equal; with equal scores neither is better.
    """

    def rank(row: Row) -> tuple[float, ...]:
        return tuple(number(row, name) for name in scores)

    def merge(rows: Numbered) -> Numbered:
        for prompt, group in groupby(rows, key=lambda item: item[1].get("prompt")):
            numbered = list(group)
            try:
                ranked = sorted((row for _, row in numbered), key=rank, reverse=True)
            except UnusableRowError:
                ranked = [row for _, row in numbered]
            best, worst = ranked[0], ranked[-1]
            yield numbered[0][0], {"prompt": prompt, "best": best, "worst": worst}

    return merge


_SCORES = ("helpfulness", "correctness", "coherence")


def _helpsteer(name: str) -> Entry:
    return Entry(
        name,
        helpsteer_turns,
        "{best[response]}",
        "{worst[response]}",
        first_is_better=lambda row: None if _equal(row, _SCORES) else True,
        margin=lambda row: (number(row, "best", _SCORES[0]) - number(row, "worst", _SCORES[0])) / 4,
        columns=("prompt", "response", *_SCORES),
        merge=best_and_worst(*_SCORES),
        keep=(),
    )


def _equal(row: Row, scores: Iterable[str]) -> bool:
    return all(number(row, "best", name) == number(row, "worst", name) for name in scores)


def _sign(value: float) -> bool | None:
    return None if value == 0 else value > 0


CATALOG: tuple[Entry, ...] = (
    # DeepSpeed-Chat's.
    Entry("Dahoas/rm-static", "{prompt}", "{chosen}", "{rejected}"),
    Entry("Dahoas/full-hh-rlhf", "{prompt}", "{chosen}", "{rejected}"),
    Entry("Dahoas/synthetic-instruct-gptj-pairwise", asked("prompt"), " {chosen}", " {rejected}"),
    Entry("yitingxie/rlhf-reward-datasets", "{prompt}Assistant:", behind_assistant("chosen"),
          behind_assistant("rejected"), columns=("chosen", "rejected")),
    Entry("openai/webgpt_comparisons", asked("question[full_text]"), without_citations("answer_0"),
          without_citations("answer_1"), columns=("answer_0", "answer_1", "score_0", "score_1"),
          first_is_better=lambda row: number(row, "score_0") >= number(row, "score_1")),
    Entry("stanfordnlp/SHP", asked("history"), " {human_ref_A}", " {human_ref_B}",
          columns=("labels",), first_is_better=lambda row: number(row, "labels") == 1),
    Entry("pvduy/sharegpt_alpaca_oa_vicuna_format", vicuna_prompt, " {label}",
          columns=("prompt", "label")),
    Entry("wangrui6/Zhihu-KOL", asked("INSTRUCTION"), " {RESPONSE}"),
    Entry("Cohere/miracl-zh-queries-22-12", asked("query"), " {positive_passages[0][text]}",
          " {negative_passages[0][text]}"),
    Entry("Cohere/miracl-ja-queries-22-12", asked("query"), " {positive_passages[0][text]}",
          " {negative_passages[0][text]}"),
    Entry("Hello-SimpleAI/HC3-Chinese", asked("question"), " {human_answers[0]}", config="all"),
    Entry("mkqa-Chinese", asked("queries[zh_cn]"), " {answers[zh_cn][0][text]}", hub="apple/mkqa"),
    Entry("mkqa-Japanese", asked("queries[ja]"), " {answers[ja][0][text]}", hub="apple/mkqa"),
    Entry("lmqg/qg_jaquad", asked("question"), " {sentence}"),
    Entry("lmqg/qag_jaquad", asked("questions[0]"), " {paragraph}"),
    Entry("local/jsonfile", " {prompt}", " {chosen}", " {rejected}", folder="."),
    # Others.
    Entry("ultrafeedback_binarized", None, "{chosen}", "{rejected}",
          margin=lambda row: (number(row, "score_chosen") - number(row, "score_rejected")) / 10,
          columns=("score_chosen", "score_rejected"),
          splits={"train": ("train_prefs",), "eval": ("test_prefs",)}),
    _helpsteer("nvidia/HelpSteer"),
    _helpsteer("nvidia/HelpSteer2"),
    Entry("nvidia/HelpSteer2-preference", helpsteer_turns, "{response_1}", "{response_2}",
          first_is_better=lambda row: _sign(-number(row, "preference_strength")),
          margin=lambda row: abs(number(row, "preference_strength")) / 3,
          columns=("prompt", "preference_strength"), hub="nvidia/HelpSteer2",
          data_dir="preference"),
    Entry("openai/summarize_from_feedback", "SUBREDDIT: r/{info[subreddit]}\n\n"
          "TITLE: {info[title]}\n\nPOST: {info[post]}\n\nTL;DR:", "{summaries[0][text]}",
          "{summaries[1][text]}", columns=("choice",), config="comparisons",
          first_is_better=lambda row: number(row, "choice") == 0),
    Entry("hh-rlhf-chat", None, transcript("chosen"), transcript("rejected"),
          columns=("chosen", "rejected"), hub="Anthropic/hh-rlhf"),
    Entry("gsm8k", user("{question}"), "{answer}", columns=("question",), keep=("answer",),
          hub="openai/gsm8k", config="main"),
)  # fmt: skip
"""A path is read by the entry with the longest name in it, if its rows have the columns."""
