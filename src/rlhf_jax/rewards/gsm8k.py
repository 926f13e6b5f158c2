"""Whether an answer to a GSM8K question ends in the right number.

Rows of GSM8K (openai/gsm8k) have the columns `question` and `answer`; a solution ends in a line
`#### 42`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

MARKER = "####"
NUMBER = re.compile(r"(?:(?<![\d.])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
"""A minus behind a digit subtracts; commas stand between groups of three digits, others between
numbers.
"""


def gsm8k_correct(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer: Sequence[str | None],
    **columns: Any,
) -> list[float | None]:
    """1.0 where an answer's number equals the solution's, else 0.0.

    The number of an answer is the one behind `####`, or the last one where nothing is marked.
    `answer` are the solutions of the data set; a row without one (None) is not judged.

    Raises:
        ValueError: a solution has no number behind `####`.
    """
    del prompts, columns
    return [
        None if solution is None else float(number_of(text_of(completion)) == expected(solution))
        for completion, solution in zip(completions, answer, strict=True)
    ]


def text_of(completion: Any) -> str:
    """A completion as text: TRL hands over strings, or messages where the prompt has them."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def expected(solution: str) -> Decimal:
    """The number of a solution."""
    _, marker, tail = solution.rpartition(MARKER)
    number = number_of(tail) if marker else None
    if number is None:
        raise ValueError(f"the solution {solution[-60:]!r} has no number behind {MARKER}")
    return number


def number_of(text: str) -> Decimal | None:
    """The first number behind the last `####`, or without one the last number of the text."""
    _, marker, tail = text.rpartition(MARKER)
    found = NUMBER.findall(tail)
    if not found:
        return None
    return Decimal((found[0] if marker else found[-1]).replace(",", "").replace("$", ""))
