"""Commands in the tutorials and in troubleshooting: their flags, keys and scripts exist."""

import re
import shlex
from pathlib import Path

import pytest

from rlhf_jax.cli import parse

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("tutorial_own_data", "tutorial_from_deepspeed_chat", "troubleshooting")
TRAIN = "python -m rlhf_jax.train "


def fenced(page: str, language: str) -> list[str]:
    """The blocks of a page in one language; `""` are those without one."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in blocks if name == language]


def commands(page: str) -> list[list[str]]:
    """Every `python …` of a page as words, continued lines joined."""
    lines = "".join(fenced(page, "")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]


@pytest.mark.parametrize("page", PAGES)
def test_training_commands_parse_to_a_config(page, tmp_path, monkeypatch) -> None:
    """Unknown flags and keys, values out of range and contradictions are errors of `parse`."""
    monkeypatch.chdir(tmp_path)
    for block in fenced(page, "yaml"):
        Path("mine.yaml").write_text(block, encoding="utf-8")
    trained = [words for words in commands(page) if words[:3] == TRAIN.split()]
    assert trained
    for words in trained:
        parse(words[3:])


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_linked_pages_exist(page) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert links
    for target in links:
        assert (DOCS / target).exists(), target
    for words in commands(page):
        if words[1].startswith("scripts/"):
            assert (DOCS.parent / words[1]).exists(), words


def test_the_rows_of_the_own_data_tutorial_are_those_that_it_says(tmp_path, monkeypatch) -> None:
    (program,) = fenced("tutorial_own_data", "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "make_rows.py", "exec"), {})
    for name in ("demos.jsonl", "pairs.jsonl"):
        assert len(Path(name).read_text(encoding="utf-8").splitlines()) == 90
