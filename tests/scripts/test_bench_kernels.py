"""The kernels' benchmark runs on a CPU, and its kernels are those of the references."""

import sys

import jax
import pytest

from scripts import bench_kernels

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="--tiny is for a CPU")


def test_half_layers_chain_whatever_form_their_rows_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--tiny", "--only", "half_layer", "--cases", "relu"])
    bench_kernels.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == [
        f"half_layer/relu{form}" for form in ("", "_int8", "_fp8")
    ]
    assert all(float(line[-1]) < 1e-2 for line in lines)
