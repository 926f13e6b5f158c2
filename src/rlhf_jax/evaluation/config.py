"""What `python -m rlhf_jax.evaluate` takes: one dataclass for each of its commands."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from rlhf_jax.data.tokenize import Overlong
from rlhf_jax.inference.dtypes import LoadDtype


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all commands take."""

    output: str | None = None
    """A file that gets everything as JSON."""
    max_rows: int | None = None
    """Only the first rows of the data."""
    batch_size: int = 32
    """Rows that run at once, about."""
    mesh: str | None = None
    """FxT, such as 1x1 or 2x4; by default all visible devices."""
    dtype: LoadDtype = "float32"
    """What the weights are held in."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}={value} must be at least 1")


@dataclass(frozen=True)
class Compare(Common):
    """Answers of two models to the same prompts, side by side; with a judge also who wins."""

    baseline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="BASELINE")]
    """A run's directory (its actor/, else its dpo/ or sft/), a Hugging Face directory or a Hub
    name."""
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The model that is meant to be better, named as BASELINE is."""
    prompts: str | None = None
    """A text file with a prompt a line, or rows with a column prompt (a file, a folder or a Hub
    id); by default six built-in questions."""
    judge: str | None = None
    """A reward model: a run's directory (its reward/), a Hugging Face directory or a Hub name."""
    turn_format: str | None = None
    """How a question is written, such as "Human: {} Assistant:"; \\n is a line break, and {} alone
    takes prompts as they are. By default as training asked each model; else by its chat template;
    else "Human: {} Assistant:"."""
    max_new_tokens: int | None = None
    """Longest answer; by default 100, or what fits into the models' positions beside the longest
    prompt. Prompts that leave less than a quarter of the positions are left out."""
    temperature: float = 0.0
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and answer so far become less likely."""
    seed: int = 0
    """Of sampling and of the bootstrap."""
    shown: int = 6
    """How many prompts are printed with both answers; the file has all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens={self.max_new_tokens} must be at least 1")


@dataclass(frozen=True)
class Reward(Common):
    """How well a reward model tells better answers from worse ones, and what it goes by."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A reward model: a run's directory (its reward/), a Hugging Face directory or a Hub name."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Preference pairs as step 2 takes them: quickstart, a file, a folder or a Hub id; rows held
    out where the data say so, else all."""
    max_length: int | None = None
    """Tokens of prompt and answer together, at most; by default the model's positions."""
    overlong: Overlong = "drop"
    """Longer pairs are left out, cut to the length, or lose the oldest turns of their prompt."""
    bins: int = 10
    """Rows of the calibration table."""
    seed: int = 0
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 1:
            raise ValueError(f"--bins={self.bins} must be at least 1")


@dataclass(frozen=True)
class Perplexity(Common):
    """Perplexity of running text, or of the answers to prompts."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's directory (its actor/, else its dpo/ or sft/), a Hugging Face directory or a Hub
    name."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A text file (one document), or rows as step 1 takes them: with a column text each row is a
    document, with prompts the answers alone count. Files may end in .gz."""
    window: int | None = None
    """Tokens that the model sees at once; by default its positions, at most 2048."""
    overlap: int = 0
    """Tokens that a window repeats of the one before, as context alone: 0 cuts the text into
    chunks, more of them slide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 2:
            raise ValueError(f"--window={self.window} must be at least 2")
        if self.overlap < 0:
            raise ValueError(f"--overlap={self.overlap} must be at least 0")


type Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Reward, tyro.conf.subcommand("reward")]
    | Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
)
