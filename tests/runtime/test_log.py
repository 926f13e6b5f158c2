"""What a person sees: one bar on a terminal, plain lines in a file."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from rlhf_jax.runtime import log


def test_in_a_file_every_interval_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with log.progress("ppo", total=5, every=2) as shown:
        for done in range(1, 6):
            shown.update(done, {"reward": done / 10} if done % 2 == 0 else None)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"eta \S+", "eta X", line) for line in lines] == [
        "ppo  2/5  eta X  reward 0.2",
        "ppo  4/5  eta X  reward 0.4",
        "ppo  5/5  eta X  reward 0.4",
    ]
    assert lines[-1].startswith("ppo  5/5  eta 0:00")


def test_a_fact_is_one_line_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    fact = "mesh [bold]4x2[/bold] " + "x" * 200
    log.say(fact)
    assert capsys.readouterr().out == f"{fact}\n"


def test_on_a_terminal_there_is_a_bar_with_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(log, "console", terminal)
    with log.progress("sft", total=4, done=1) as shown:
        shown.update(3, {"loss": 1.25, "[x]": 2.0})
        log.say("a fact above the bar")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "a fact above the bar\n" in text
    assert re.search(r"sft .*3/4 .*eta .*loss 1\.25  \[x\] 2", text)


def test_a_narrow_terminal_cuts_metrics_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(log, "console", Console(file=screen, force_terminal=True, width=60))
    with log.progress("ppo", total=1500) as shown:
        shown.update(120, {"scores": -0.448, "kl": -7.451e-09, "length": 6.625})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"ppo +120/1500 eta \S+ scores -0\.448  kl -7\.451e-09  len…", text)


def test_a_silenced_process_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "console", Console())
    log.silence()
    log.say("hidden")
    with log.progress("sft", total=1) as shown:
        shown.update(1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("errors", [subprocess.PIPE, subprocess.STDOUT])
def test_what_nobody_reads_any_more_ends_nothing(errors: int) -> None:
    """As `| tee log` when ctrl-C has ended tee; with `2>&1 |` errors have no reader either."""
    program = """
import sys
from rlhf_jax.runtime.log import say

sys.stdin.read()
say("one")
say("two")
print("interrupted", file=sys.stderr)
sys.exit(130)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=errors, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()
        said = process.stderr.read() if process.stderr else None
    assert process.returncode == 130
    if said is not None:
        assert said == "nobody reads the output any more: it goes on without\ninterrupted\n"
