"""The chat program over a pipe, as a script uses it."""

import io
import shutil
from pathlib import Path

import pytest

from rlhf_jax.chat import find_policy, main

FLAGS = ("--mesh=1x1", "--temperature=0", "--max-new-tokens=8", "--turn-format={}")


@pytest.fixture
def run_directory(tmp_path: Path, directory_of) -> Path:
    """A run that has done step 1."""
    shutil.copytree(directory_of("llama"), tmp_path / "run" / "sft")
    return tmp_path / "run"


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_questions_from_a_pipe_are_answered_line_by_line(
    llama, run_directory, pipe, capsys
) -> None:
    pipe("w10 w11\n\n/clear\n/what\nw40\n" + "w40 " * 60 + "\n/quit\nw12\n")
    assert main([str(run_directory), *FLAGS]) == 0
    out, err = capsys.readouterr()
    answers = llama.generate(
        ["w10 w11", "w40"], max_new_tokens=8, temperature=0.0, prompt_length=56
    )
    assert out.splitlines() == [answer.text.strip() for answer in answers]
    assert err.splitlines() == [
        "(forgotten)",
        "there is no command /what: /clear forgets the conversation, /quit leaves",
        "that is 61 tokens, there is room for 56: shorten it",
    ]


def test_a_reward_model_is_refused_with_what_to_do(directory_of, pipe, capsys) -> None:
    pipe("w10\n")
    directory = directory_of("llama_scorer")
    assert main([str(directory), "--mesh=1x1"]) == 1
    assert f"error: {directory} is a reward model: it scores" in capsys.readouterr().err


def test_wrong_settings_are_explained(run_directory, pipe, capsys) -> None:
    pipe("")
    with pytest.raises(SystemExit, match="2"):
        main([str(run_directory), "--max-new-tokens=0"])
    assert "--max-new-tokens=0 must be at least 1" in capsys.readouterr().err
    assert main([str(run_directory), "--mesh=1x1", "--max-new-tokens=64"]) == 1
    assert "leaves no room for a question in 64 tokens" in capsys.readouterr().err


def test_the_newest_policy_of_a_run_is_taken(run_directory: Path) -> None:
    assert find_policy(str(run_directory)) == str(run_directory / "sft")
    shutil.copytree(run_directory / "sft", run_directory / "actor")
    assert find_policy(str(run_directory)) == str(run_directory / "actor")
    assert find_policy(str(run_directory / "sft")) == str(run_directory / "sft")
    assert find_policy("owner/name") == "owner/name"


def test_a_run_without_a_policy_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no trained policy: there is no actor/ or"):
        find_policy(str(tmp_path))
