"""The checkpoints of the inference tests."""

from tests.inference.conftest import directory_of, llama, scorer

__all__ = ["directory_of", "llama", "scorer"]
