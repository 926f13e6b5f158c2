"""Checks that the configs of the stages share."""

from numbers import Real


def check_at_least(owner: object, minimum: float, *names: str) -> None:
    """ValueError naming the first of these fields below `minimum` or no number (None passes)."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if value is not None and not float(value) >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_parts(name: str, rows: int, parts: int) -> None:
    """ValueError unless `gradient_accumulation_steps` divides a batch; names what would."""
    if rows % parts:
        allowed = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"gradient_accumulation_steps={parts} does not divide {name}={rows}: "
            f"use one of {allowed}"
        )
