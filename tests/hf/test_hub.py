"""Names of models: local paths first, and errors that name the nearest published model."""

import pytest

from rlhf_jax.hf import hub
from rlhf_jax.hf.hub import resolve, suggest


def test_a_local_directory_wins(golden):
    assert resolve(str(golden("opt"))) == golden("opt")


def test_a_directory_without_config_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("facebook/opt-1.4b", "facebook/opt-1.3b"),
        ("opt-1.3b", "facebook/opt-1.3b"),
        ("facebok/opt-350m", "facebook/opt-350m"),
        ("meta-llama/llama-2-7b", "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_an_unknown_name_says_what_was_tried_and_the_nearest(name, nearest):
    """Tests run offline: the Hub's answer is that the model is not in the cache."""
    with pytest.raises(ValueError, match="no such directory") as error:
        resolve(name)
    assert f"there is no model {name!r}" in str(error.value)
    assert "Hugging Face Hub says" in str(error.value)
    assert str(error.value).endswith(f"Did you mean {nearest}?")


def test_a_path_that_is_not_there_is_no_name_of_the_hub():
    with pytest.raises(ValueError, match="no such directory .*written owner/name"):
        resolve("/nowhere/at/all")


def test_nothing_is_suggested_where_nothing_is_near():
    assert suggest("zzzzzzzz") == ""


def test_the_name_itself_is_not_suggested():
    assert suggest("facebook/opt-1.3b") == ""


def test_pickles_are_fetched_only_where_there_are_no_safetensors(monkeypatch, tmp_path):
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve("facebook/opt-125m") == tmp_path
    assert "model*.safetensors" in asked[0]
    assert "pytorch_model*.bin" not in asked[0]
    assert "pytorch_model*.bin" in asked[1]
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolve("facebook/opt-125m")
    assert len(asked) == 3
