"""Rewards from Python: functions by name, called as TRL calls its own, and checked.

A function takes keywords and returns a score for every answer: `f(prompts, completions,
completion_ids, **columns) -> list[float | None]`; `columns` are the further columns of the data
set, a list each. None says that the function does not judge that row.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

GIVEN = ("prompts", "completions", "completion_ids")
"""What every function is called with, beside the columns of the data."""


@dataclass(frozen=True)
class RewardFunction:
    """`source` is what was asked for, `name` what metrics call it."""

    source: str
    name: str
    weight: float
    function: Callable[..., Any]


def load_reward_functions(
    sources: Sequence[str], weights: Sequence[float] = ()
) -> tuple[RewardFunction, ...]:
    """The functions, weighted by 1 where no weights are given; ValueError says what is wrong."""
    twice = [source for source, count in Counter(sources).items() if count > 1]
    if twice:
        raise ValueError(f"--ppo.reward-fn names {', '.join(twice)} twice: give it one weight")
    functions = [load_function(source) for source in sources]
    shared = Counter(source.rpartition(":")[2] for source in sources)
    return tuple(
        RewardFunction(source, metric_name(source, shared), weight, function)
        for source, function, weight in zip(
            sources, functions, weights or [1.0] * len(sources), strict=True
        )
    )


def metric_name(source: str, shared: Mapping[str, int]) -> str:
    """The function's own name, behind its module's where several functions have that name."""
    module, _, name = source.rpartition(":")
    if shared[name] == 1:
        return name
    return f"{module.removesuffix('.py').replace('/', '.').strip('.')}.{name}"


def load_function(source: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names.

    Modules are found as `python -m` finds them: in the working directory too.

    Raises:
        ValueError: no such file, module or function; it cannot be imported, or be called with
            the keywords that it will be called with.
    """
    module_name, colon, name = source.rpartition(":")
    if not colon or not module_name or not name:
        raise ValueError(
            f"--ppo.reward-fn={source}: give module:function, or path/to/file.py:function"
        )
    module = import_module(source, module_name)
    try:
        function = attrgetter(name)(module)
    except AttributeError as error:
        there = [key for key, value in vars(module).items() if is_own(module, key, value)]
        raise ValueError(
            f"--ppo.reward-fn={source}: {module_name} has no {name}; it defines "
            f"{', '.join(there) or 'no function'}"
        ) from error
    if not callable(function):
        raise ValueError(
            f"--ppo.reward-fn={source}: {name} is a {type(function).__name__}, not a function"
        )
    check_takes(source, function, GIVEN)
    return function


def is_own(module: ModuleType, key: str, value: object) -> bool:
    """Whether a module's attribute is a public function that it defines."""
    return inspect.isfunction(value) and value.__module__ == module.__name__ and key[0] != "_"


def import_module(source: str, name: str) -> ModuleType:
    """A module by name or by its file."""
    file = Path(name).expanduser()
    if name.endswith(".py") and not file.is_file():
        raise ValueError(f"--ppo.reward-fn={source}: no such file: {file.absolute()}")
    try:
        if name.endswith(".py"):
            return import_file(file)
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    except Exception as error:  # the file is the user's: anything can go wrong in it
        if isinstance(error, ModuleNotFoundError) and error.name == name.split(".")[0]:
            where = f"looked in {Path.cwd()} and the installed packages"
            raise ValueError(
                f"--ppo.reward-fn={source}: there is no module {name} ({where}); a file is named "
                "as path/to/file.py:function"
            ) from error
        raise ValueError(
            f"--ppo.reward-fn={source}: importing {name} failed with {described(error)}"
        ) from error


def import_file(file: Path) -> ModuleType:
    """A file as a module; its folder's other modules can be imported by it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def check_takes(source: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """ValueError where a function cannot be called with these keywords, or does not return scores
    but promises them.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"--ppo.reward-fn={source} is async, and nothing awaits it: make it plain")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return
    refused = [name for name in names if not takes(signature, name)]
    if refused:
        raise ValueError(
            f"--ppo.reward-fn={source} does not take {', '.join(refused)}: it is called with "
            f"keywords, so end its parameters in **columns (they are now {signature})"
        )


def takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a keyword may be passed."""
    named = signature.parameters.get(name)
    if named is not None:
        return named.kind is not inspect.Parameter.POSITIONAL_ONLY
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def check_columns(functions: Sequence[RewardFunction], columns: Sequence[str]) -> None:
    """ValueError where data with these further columns cannot be judged by every function."""
    clashing = sorted(set(columns) & set(GIVEN))
    if clashing and functions:
        raise ValueError(
            f"the data set has columns {', '.join(clashing)}, which reward functions get from the "
            "run: rename them"
        )
    for reward in functions:
        check_takes(reward.source, reward.function, columns)
        missing = [name for name in needed(reward.function) if name not in (*GIVEN, *columns)]
        if missing:
            raise ValueError(
                f"--ppo.reward-fn={reward.source} needs {', '.join(missing)}, which the prompts' "
                f"data set does not have; its further columns: {', '.join(columns) or 'none'}. "
                "What is read as prompt or answer (chosen, completion, messages …) is not passed "
                "on: copy it to a column of another name"
            )


def needed(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def described(error: Exception) -> str:
    """An exception and the line of code that raised it."""
    lines = str(error).strip().splitlines()
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}, line {last.lineno}"
    return f"{type(error).__name__}: {lines[0] if lines else ''} ({place})"
