"""The chat program over a pipe, as a script uses it; and what a person's ctrl-C does."""

import io
import json
import shutil
import signal
from pathlib import Path

import pytest

from rlhf_jax import chat
from rlhf_jax.chat import main
from rlhf_jax.inference.interrupts import Interrupts
from rlhf_jax.inference.places import find_policy, sampled_turn_format
from rlhf_jax.inference.streaming import TOKENS_A_CALL, Streamer

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
    pipe("w10 w11\n\n/clear\nw40\n/quit\nw12\n")
    assert main([str(run_directory), *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == answers(llama, "w10 w11", "w40")
    assert err.splitlines() == ["(forgotten)"]


def test_a_mark_of_the_byte_order_is_no_part_of_a_question(
    llama, run_directory, pipe, capsys
) -> None:
    """Editors that begin a file with one are common, and data are read without it too."""
    pipe("\ufeffw10 w11\nw40\n")
    assert main([str(run_directory), *FLAGS]) == 0
    assert capsys.readouterr().out.splitlines() == answers(llama, "w10 w11", "w40")


def answers(llama, *questions: str) -> list[str]:
    """The line that each question gets with `FLAGS`."""
    settings = {"max_new_tokens": 8, "temperature": 0.0, "prompt_length": 56}
    return [answer.text.strip() for answer in llama.generate(list(questions), **settings)]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_of_a_pipe_that_is_refused_gives_an_empty_one(
    llama, run_directory, monkeypatch, capsys, errors
) -> None:
    """Questions and answers stay in step, and the exit code tells; whatever the locale does with
    bytes that are not UTF-8.
    """
    text = b"w10 w11\n" + b"w40 " * 60 + b"\n\xff\xfe w10\n/what\n/system \xff\nw40\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8", errors))
    assert main([str(run_directory), *FLAGS]) == 1
    out, err = capsys.readouterr()
    first, last = answers(llama, "w10 w11", "w40")
    assert out.splitlines() == [first, "", "", "", "", last]
    no_text = "that is not UTF-8 text: convert it, as with `iconv -t UTF-8`"
    assert err.splitlines() == [
        "that is 61 tokens, there is room for 56: shorten it",
        no_text,
        f"there is no command /what: {chat.COMMANDS}",
        no_text,
    ]


def test_a_person_may_ask_again(run_directory, monkeypatch, capsys) -> None:
    """On a terminal a refused line is no failure and prints nothing."""
    lines = iter(["w40 " * 60, None])
    monkeypatch.setattr(chat, "read_line", lambda interactive: next(lines))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main([str(run_directory), *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is room for 56: shorten it" in err


def test_short_names_of_dtypes_are_taken(run_directory, pipe, capsys) -> None:
    said = []
    for name in ("bf16", "bfloat16"):
        pipe("w10 w11\n")
        assert main([str(run_directory), *FLAGS, f"--dtype={name}"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != "\n"


def test_sampling_flags_and_seeds_are_those_of_generate(llama, run_directory, pipe, capsys) -> None:
    """The n-th answer has the n-th seed; instructions stand in front."""
    pipe("w10 w11\n/system w30 w31\nw40\n/system\nw40\n")
    flags = ("--temperature=0.9", "--top-k=30", "--top-p=0.9", "--min-p=0.02", "--seed=5")
    assert main([str(run_directory), *FLAGS, *flags, "--repetition-penalty=1.3"]) == 0
    out, err = capsys.readouterr()
    settings = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
    settings["repetition_penalty"] = 1.3
    answers = [
        llama.generate([prompt], max_new_tokens=8, prompt_length=56, seed=5 + n, **settings)[0]
        for n, prompt in enumerate(["w10 w11", "w30 w31 w40", "w40"])
    ]
    assert out.splitlines() == [answer.text.strip() for answer in answers]
    assert len(set(out.splitlines())) == 3
    assert err.splitlines() == ["(the instructions are set)", "(no instructions)"]


def test_ctrl_c_stops_an_answer_and_not_the_program(
    run_directory, llama, monkeypatch, capsys
) -> None:
    """The other questions are answered, as far as the limit lets them; on a terminal alone."""
    asked = ["w10 w11", "w40", "w80"]
    lines = iter([*asked, None])
    monkeypatch.setattr(chat, "read_line", lambda interactive: next(lines))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    first, whole = iter([True, False, False]), Streamer.tokens

    def tokens(self, prompt, *, seed):
        interrupted = next(first)
        for chunk in whole(self, prompt, seed=seed):
            if interrupted:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(Streamer, "tokens", tokens)
    flags = ("--mesh=1x1", "--temperature=0", "--max-new-tokens=24", "--turn-format={}")
    before = signal.getsignal(signal.SIGINT)
    assert main([str(run_directory), *flags]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    stopped, *others = out.splitlines()
    one, *rest = llama.generate(asked, max_new_tokens=24, temperature=0.0, prompt_length=40)
    assert one.text.split()[:TOKENS_A_CALL] == stopped.split()
    assert len(one.text.split()) > TOKENS_A_CALL
    assert others == [answer.text.strip() for answer in rest]
    assert [answer.stopped for answer in rest] == [True, False]
    assert err.splitlines()[-2:] == ["(stopped)", "(cut off: --max-new-tokens=24)"]


def test_a_second_ctrl_c_leaves() -> None:
    interrupts = Interrupts()
    with interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interrupts:
        assert not interrupts.came


def test_ctrl_c_in_a_script_ends_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts(enabled=False):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("line", [b'{"text": "hello"}', b"[1]", b'{"prompt": 3}', b"no", b"\xff"])
def test_other_files_beside_a_model_say_nothing(tmp_path, line) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "mine.jsonl").write_bytes(line + b"\n")
    assert sampled_turn_format(str(tmp_path / "model.gguf")) is None


def test_a_run_is_asked_as_it_was_trained(run_directory, pipe, capsys) -> None:
    """Its sample tables show how; a half-written last line is not read."""
    (run_directory / "samples").mkdir()
    row = json.dumps({"prompt": "Human: w10 Assistant:", "answer": "w11"})
    (run_directory / "samples" / "ppo.jsonl").write_text(row + "\n" + row[:9])
    assert sampled_turn_format(str(run_directory / "sft")) == "Human: {} Assistant:"
    pipe("w10\n")
    assert main([str(run_directory), "--mesh=1x1", "--max-new-tokens=8"]) == 0
    assert "no chat template" not in capsys.readouterr().err


def test_a_base_model_without_a_template_is_told(directory_of, pipe, capsys) -> None:
    pipe("w10\n")
    assert main([str(directory_of("llama")), "--mesh=1x1", "--max-new-tokens=8"]) == 0
    assert "has no chat template, and nothing tells how" in capsys.readouterr().err


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
    assert main([str(run_directory), "--mesh=1x1", "--context=65"]) == 1
    assert "--context=65 is more than the model's 64 positions" in capsys.readouterr().err
    for flag in ("--system", "--turn-format"):
        with pytest.raises(SystemExit, match="2"):
            main([str(run_directory), f"{flag}=\udcff{{}}"])
        assert f"{flag} is not UTF-8 text" in capsys.readouterr().err


def test_the_newest_policy_of_a_run_is_taken(run_directory: Path) -> None:
    assert find_policy(str(run_directory)) == str(run_directory / "sft")
    shutil.copytree(run_directory / "sft", run_directory / "actor")
    assert find_policy(str(run_directory)) == str(run_directory / "actor")
    assert find_policy(str(run_directory / "sft")) == str(run_directory / "sft")
    assert find_policy("owner/name") == "owner/name"


def test_a_run_without_a_policy_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no trained policy: there is no actor/ or"):
        find_policy(str(tmp_path))
