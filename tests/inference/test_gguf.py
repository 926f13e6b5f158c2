"""A GGUF file is a model like any other: by its name, or that of a directory that holds it."""

import io
from pathlib import Path

import pytest

import rlhf_jax
from rlhf_jax.chat import main
from rlhf_jax.inference.places import find_policy
from tests.hf.gguf_files import letters_model
from tests.inference.conftest import GOLDENS

FLAGS = ("--mesh=1x1", "--temperature=0", "--max-new-tokens=8", "--turn-format={}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return letters_model(tmp_path / "tiny.gguf", GOLDENS / "llama")


def test_the_chat_program_talks_to_a_file_and_to_its_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer is that of the same weights in Hugging Face's format."""
    said = []
    for name in (file, file.parent):
        monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n"))
        assert main([str(name), *FLAGS]) == 0
        said.append(capsys.readouterr().out.strip())
    rlhf_jax.load(file, mesh="1x1").save_hf(file.parent / "same")
    same = rlhf_jax.load(file.parent / "same", mesh="1x1")
    (answer,) = same.generate(["1+2="], max_new_tokens=8, temperature=0.0, prompt_length=56)
    assert said == [answer.text.strip()] * 2
    assert answer.text.strip()


def test_a_directory_with_several_files_is_refused_and_trained_models_come_first(
    file: Path,
) -> None:
    second = file.with_name("second.gguf")
    second.write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(second.gguf, tiny.gguf\): name"):
        find_policy(str(file.parent))
    (file.parent / "actor").mkdir()
    (file.parent / "actor" / "config.json").write_text("{}")
    assert find_policy(str(file.parent)) == str(file.parent / "actor")
