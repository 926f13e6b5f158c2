"""Text out of the fields of a row, by a format string: ` Human: {question[full_text]} Assistant:`.

`{a}` is a column, `{a[b]}` a field in it, `{a[0]}` the first item of a list. A string that is one
field and nothing else gives the field as it is, so that it may hold messages.
"""

from collections.abc import Callable, Mapping
from string import Formatter

from rlhf_jax.data.conversations import read_text
from rlhf_jax.data.records import Message, Text

type Row = Mapping[str, object]
type Field = str | Callable[[Row], Text]


class UnusableRowError(Exception):
    """Why a row is dropped, in a few words."""


def columns_of(field: Field) -> tuple[str, ...]:
    """The columns that a format string reads; of a function none are known."""
    if callable(field):
        return ()
    names = [name for _, name, _, _ in Formatter().parse(field) if name]
    return tuple(dict.fromkeys(name.split("[")[0] for name in names))


def fill(field: Field, row: Row, where: str) -> Text:
    """What a field says about a row.

    Raises:
        UnusableRowError: a value is null or not there.
        ValueError: a value is neither text nor messages.
    """
    if callable(field):
        return field(row)
    parts = list(Formatter().parse(field))
    values = [_look_up(name, row, where) for _, name, _, _ in parts if name]
    if len(parts) == 1 and not parts[0][0]:
        return values[0]
    texts = iter(values)
    filled: list[str] = []
    for literal, name, _, _ in parts:
        value = next(texts) if name else ""
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} holds messages, and text is written around it")
        filled += [literal, value]
    return "".join(filled)


def _look_up(name: str, row: Row, where: str) -> Text:
    try:
        value, _ = Formatter().get_field(name, (), row)
    except (KeyError, IndexError, TypeError) as error:
        raise UnusableRowError(f"no {name}") from error
    text = read_text(value, name, where)
    if text is None:
        raise UnusableRowError("a value is null")
    return text


def user(field: str) -> Field:
    """A format string as what a person says: the model's chat template writes it out."""

    def ask(row: Row) -> Text:
        text = fill(field, row, field)
        assert isinstance(text, str), f"{field} holds messages already"
        return (Message("user", text),)

    return ask
