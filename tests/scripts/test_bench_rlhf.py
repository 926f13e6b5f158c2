"""Flags of `bench_rlhf.py` that exclude each other."""

import sys

import pytest

from scripts.bench_rlhf import arguments


@pytest.mark.parametrize("flag", ["--packing", "--offload-optimizers"])
def test_programs_that_are_not_known_are_not_compiled_ahead(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_rlhf.py", "--compile-ahead", flag])
    with pytest.raises(SystemExit):
        arguments()
    assert "leave it out" in capsys.readouterr().err
