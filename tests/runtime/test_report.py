"""The report of a run: what it shows, and that it never harms or misleads."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf_jax import report
from rlhf_jax.runtime.report.charts import MAX_ROWS, curves
from rlhf_jax.runtime.report.live import LiveReport
from rlhf_jax.runtime.report.page import State, all_samples, build_report
from rlhf_jax.runtime.report.reading import read_run
from rlhf_jax.runtime.report.settings import Baseline
from rlhf_jax.runtime.report.verdict import figures, verdict
from tests.runtime.runs import ppo_rows, write_run


def payload(page: str) -> dict[str, Any]:
    """The data of a page, found as a browser does: up to the first closing tag."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_page_loads_nothing_and_texts_in_it_stay_texts(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><!-- <img src=x onerror="alert(2)"> & \u2028 \ud800'
    samples = [{"step": 0, "prompt": evil, "answer": evil, "score": 1.0}]
    rows = [{"stage": evil, "step": 0, "time": 1.0, evil: 1.0}]
    config = f"step: [1]\nrun_name: {json.dumps('<script>alert(3)</script>')}\n"
    run = write_run(tmp_path, rows, samples={"ppo": samples}, config=config)
    page = build_report(run).read_text()
    assert page.count("<script") == page.count("</script") == 2  # the data's and the page's own
    assert "<img" not in page
    assert "&lt;script&gt;alert(3)" in page
    assert payload(page)["samples"]["ppo"][0]["prompt"] == evil
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", page)


@pytest.mark.parametrize("stages", [[], ["sft"], ["ppo"], ["dpo"], ["something-new"]])
def test_runs_of_nothing_one_stage_and_one_point(tmp_path: Path, stages: list[str]) -> None:
    rows = [
        {"stage": stage, "step": 0, "time": 5.0, "loss": None, "odd/one": 2, "timing_s/step": 1.0}
        for stage in stages
    ]
    page = build_report(write_run(tmp_path, rows)).read_text()
    found = payload(page)["stages"]
    assert list(found) == stages
    for stage in found.values():
        assert stage["values"]["loss"] == ["x"]
        shown = [name for chart in stage["charts"] + stage["others"] for name in chart["names"]]
        assert sorted(shown) == ["loss", "odd/one"]


def test_every_metric_has_one_chart(tmp_path: Path) -> None:
    frozen = Path(__file__).parents[1] / "e2e" / "metrics.txt"
    names = frozen.read_text().split("\n")
    rows = {}
    for line in filter(None, names):
        stage, name = line.split()
        rows.setdefault(stage, {"stage": stage, "step": 1, "time": 1.0})[name] = 1.0
    run = read_run(write_run(tmp_path, rows.values()))
    for name, stage in curves(run).items():
        shown = [name for chart in stage["charts"] + stage["others"] for name in chart["names"]]
        assert sorted(shown) == sorted(set(rows[name]) - {"stage", "step", "time", "timing_s/step"})
    others = {name: stage["others"] for name, stage in curves(run).items()}
    assert {c["title"] for c in others["ppo"]} == {
        "objective/non_score_reward", "policy/abs_log_ratio", "val/num_eos_tokens", "val/ratio",
        "val/ratio_var",
    }  # fmt: skip


def test_long_runs_are_thinned_but_keep_evaluations_breaks_and_the_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"stage": "sft", "step": n, "time": 1e9 + n, "loss": 1.0} for n in range(3 * MAX_ROWS)
    ]
    rows[100]["eval/loss"] = 2.0
    rows[200] |= {"loss": None, "nonfinite": ["loss"]}
    stage = curves(read_run(write_run(tmp_path, rows)))["sft"]
    assert len(stage["steps"]) <= MAX_ROWS + 3
    assert {0, 100, 200, 3 * MAX_ROWS - 1} <= set(stage["steps"])
    assert stage["values"]["loss"][stage["steps"].index(200)] == "x"
    assert (stage["every"], stage["rows"]) == (3, 3 * MAX_ROWS)


def test_a_resumed_runs_samples_stand_once(tmp_path: Path) -> None:
    def table(step: int, answer: str) -> list[dict[str, Any]]:
        return [{"step": step, "prompt": p, "answer": answer, "score": None} for p in "ab"]

    written = table(0, "x") + table(5, "old") + table(0, "x") + table(0, "x") + table(5, "new")
    samples = read_run(write_run(tmp_path, samples={"ppo": written})).samples["ppo"]
    assert [(row["step"], row["answer"]) for row in samples] == [(0, "x")] * 2 + [(5, "new")] * 2


def test_a_sample_that_was_cut_inside_a_letter_is_left_out(tmp_path: Path) -> None:
    row = {"step": 0, "prompt": "a", "answer": "schön", "score": None}
    directory = write_run(tmp_path, samples={"sft": [row]})
    path = directory / "samples/sft.jsonl"
    whole = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(whole + whole[: whole.index("ö".encode()) + 1])
    assert read_run(directory).samples["sft"] == [row]


def test_samples_of_many_evaluations_are_the_first_the_last_and_some_between(
    tmp_path: Path,
) -> None:
    table = [{"step": n, "prompt": "p" * 9000, "answer": "a"} for n in range(100)]
    run = read_run(write_run(tmp_path, samples={"ppo": table}))
    shown = all_samples(run)["ppo"]
    assert [shown[0]["step"], shown[-1]["step"], len(shown)] == [0, 99, 12]
    assert shown[0]["prompt"].endswith("(3000 more characters)")
    assert "12 of 100 evaluations" in build_report(tmp_path).read_text()


def test_settings_that_differ_are_marked_with_what_they_differ_from(tmp_path: Path) -> None:
    config = "step: [1]\nmesh: null\nppo:\n  kl_coef: 0.5\n  ema:\n    enable: false\n"
    usual = {"step": (1,), "mesh": None, "ppo.kl_coef": 0.1, "ppo.ema.enable": False}
    page = build_report(
        write_run(tmp_path, config=config), baseline=Baseline("the <nearest>", usual)
    ).read_text()
    (changed,) = re.findall(r'<div class="changed d1">(.*?)</div>', page, re.S)
    assert " ".join(re.sub("<.*?>", " ", changed).split()) == "kl_coef: 0.5 # 0.1"
    assert "the &lt;nearest&gt;: 1 settings differ" in page


BEFORE = {
    "eval/objective/scores": -0.5,
    "eval/objective/kl": 0.0,
    "eval/response_length/mean": 10.0,
}
AFTER = {"eval/objective/scores": 0.5, "eval/objective/kl": 2.0, "eval/response_length/mean": 15.0}


def test_the_verdict_says_what_ppo_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path, summary={"ppo": {"before": BEFORE, "after": AFTER}})
    said = verdict(read_run(run), 1)
    assert said == (
        "PPO raised the held-out score from -0.500 to 0.500 with a KL of 2.000 nats an answer; "
        "answers are 50 % longer. 1 warning below."
    )


def test_the_verdict_of_a_run_that_changed_nothing(tmp_path: Path) -> None:
    """Differences that the digits do not show are none."""
    after = BEFORE | {"eval/objective/scores": -0.5001, "eval/response_length/mean": 10.01}
    run = write_run(tmp_path, summary={"ppo": {"before": BEFORE, "after": after}})
    assert verdict(read_run(run), 0) == (
        "PPO left the held-out score at -0.500 with a KL of 0.000 nats an answer; answers are as "
        "long as before."
    )


def test_held_out_figures_say_of_how_many_rows_they_are(tmp_path: Path) -> None:
    summary = {
        "sft": {"eval/perplexity": 2.0, "held_out_rows": 17},
        "reward": {"eval/accuracy": 1.0},
        "ppo": {"before": BEFORE, "after": AFTER, "held_out_rows": 64},
    }
    names = [figure.name for figure in figures(read_run(write_run(tmp_path, summary=summary)))]
    assert names[:3] == [
        "SFT: held-out perplexity (17 rows)",
        "Reward model: held-out accuracy",
        "PPO: held-out score (64 prompts)",
    ]


def test_the_page_shows_rows_used_and_dropped(tmp_path: Path) -> None:
    read = {"sft": {"rows": 7, "dropped": {"empty": 2, "over 9 tokens": 3}, "notes": ["<🙂>"]}}
    page = " ".join(build_report(write_run(tmp_path, read=read)).read_text().split())
    assert "<b>sft</b> 7 used, 5 dropped" in page
    assert "&lt;🙂&gt;" in page


def test_a_run_that_failed_before_its_first_row_tells_no_time(tmp_path: Path) -> None:
    failed = State("failed", "no room")
    assert "of training time" not in build_report(write_run(tmp_path), state=failed).read_text()
    assert "of training time" in build_report(write_run(tmp_path, ppo_rows())).read_text()


def test_the_verdict_of_a_run_that_diverged(tmp_path: Path) -> None:
    after = dict.fromkeys(AFTER)
    run = write_run(tmp_path, summary={"ppo": {"before": BEFORE, "after": after}})
    assert verdict(read_run(run), 0) == "the held-out score after PPO is not finite."
    assert "not finite" in build_report(run).read_text()


def test_the_verdict_of_a_run_in_progress_says_where_it_is(tmp_path: Path) -> None:
    """A metric that was measured once is told with its step: it says nothing of now."""
    rows = [{"stage": "sft", "step": n, "time": 1.0, "loss": 3.0 - n} for n in range(3)]
    rows[0]["eval/cross_entropy"] = 5.8
    assert verdict(read_run(write_run(tmp_path, rows)), 0) == (
        "Not finished: sft, reward, ppo. sft is at step 2, loss 3.000 → 1.000, "
        "eval/cross_entropy 5.800 at step 0."
    )


# --- while the run goes on, and when it ends


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_is_refreshed_with_rows_but_not_with_each(tmp_path: Path) -> None:
    run, clock = write_run(tmp_path, ppo_rows()), Clock()
    live, file = LiveReport(run, clock=clock), tmp_path / "report.html"
    live.refresh()
    assert 'class="state running"' in file.read_text()
    file.unlink()
    clock.now = 9.9
    live.refresh()
    assert not file.exists()
    clock.now = 10.1
    live.refresh()
    assert file.exists()
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (None, "finished", "finished"),
        (KeyboardInterrupt(), "interrupted", "--resume"),
        (ValueError("no <room>"), "failed", "ValueError: no &lt;room&gt;"),
    ],
)
def test_however_a_run_ends_its_report_says_so(
    tmp_path: Path, error: BaseException | None, state: str, says: str
) -> None:
    run = write_run(tmp_path, ppo_rows())
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, LiveReport(run):
        if error is not None:
            raise error
    page = (tmp_path / "report.html").read_text()
    assert f'class="state {state}"' in page
    assert says in page


def test_of_several_processes_only_the_first_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, ppo_rows())
    monkeypatch.setattr("jax.process_index", lambda: 1)
    LiveReport(run).write(State("finished"))
    assert not (run / "report.html").exists()


def test_a_report_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", ppo_rows())
    live = LiveReport(run)
    shutil.rmtree(run)
    live.write(State("running"))
    live.write(State("running"))
    assert capsys.readouterr().out.count("report.html could not be written") == 1


# --- the command


def test_the_command_writes_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"sft": {"eval/perplexity": 2.5}, "reward": {}, "ppo": {}}
    run = write_run(tmp_path, ppo_rows(), summary=done)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "st')  # a killed run leaves half a line
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert 'class="state finished"' in page
    assert "the nearest recipe, " in page
    assert "2.500" in page


def test_the_command_names_a_directory_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
    run = write_run(tmp_path / "broken")
    (run / "metrics.jsonl").write_text("{nonsense\n{}\n")
    assert report.main([str(run)]) == 1
    assert "line 1 is no JSON" in capsys.readouterr().err


def test_the_command_takes_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    assert report.main([str(run), "runs/other"]) == 2
    error = capsys.readouterr().err
    assert "runs/other: the report takes the directory of one run" in error
    assert "rlhf_jax.evaluate compare A B" in error
    assert not (run / "report.html").exists()
