"""A config as YAML: written whole, read as if its keys were flags."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rlhf_jax.cli.tokens import Given
from rlhf_jax.stages.config import TrainConfig


def to_yaml(config: TrainConfig) -> str:
    """Every field, so that `--config` reads back an equal config whatever the recipe."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True)


def read_config_file(path: str) -> list[Given]:
    """The keys of a YAML file as flags that were given.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not YAML, not a mapping, a key twice, or a value that is no scalar or list.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"--config={path}: no such file ({file.absolute()})")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines, it holds a {_kind(content)}")
    found = list(_flatten(content, path, ""))
    if any(given.name == "config" for given in found):
        raise ValueError(f"{path}: unknown key config: a config file cannot name another one")
    return found


_RESOLVED = ("bool", "null", "merge")


class _Loader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; this one refuses. Numbers and dates stay
    the text that they are: a field's type says how it is read, and `20240101_120000` may be a name.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key that is no text, {key.start_mark}")
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value!r} stands twice, {key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in _RESOLVED]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _flatten(mapping: dict[Any, Any], path: str, prefix: str) -> Iterator[Given]:
    for key, value in mapping.items():
        name = f"{prefix}{key}".replace("-", "_")
        label = f"{path}: {name}"
        if isinstance(value, dict):
            yield from _flatten(value, path, f"{name}.")
        elif isinstance(value, list):
            if any(isinstance(entry, dict | list) for entry in value):
                raise ValueError(f"{label} must be a list of plain values")
            yield Given(name, tuple(map(str, value)), label, path)
        else:
            yield Given(name, (str(value),), label, path)


def _plain(tree: Any) -> Any:
    """Tuples as lists, which YAML writes without a Python tag."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, tuple) else tree


def _kind(content: object) -> str:
    return "list" if isinstance(content, list) else "single value"
