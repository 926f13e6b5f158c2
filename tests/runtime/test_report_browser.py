"""A person clicks through a report in Chromium: it works from a file, alone, as it says."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_jax.runtime.report.page import State, build_report
from rlhf_jax.runtime.report.settings import Baseline
from tests.runtime.chromium import Page, browser, find_chromium

EVIL = '</script><script>window.harmed = 1</script><img src=x onerror="window.harmed = 1">'
CONFIG = "step: [1, 3]\nseed: 7\nppo:\n  kl_coef: 0.5\n"
NUM_STEPS = 30
CUT_AT = 10


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium: install Debian's `chromium`, or name one with $CHROMIUM")
    with browser(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in its PPO, with a value that was not finite at step 10."""
    run = tmp_path_factory.mktemp("run")
    rows = [{"stage": "sft", "step": 0, "time": 1e9, "loss": 2.0, "eval/loss": 2.1}]
    rows += [ppo_row(step) for step in range(NUM_STEPS)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text(CONFIG)
    (run / "samples").mkdir()
    table = [sample(step, n) for step in (0, 29) for n in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (run / "samples" / "ppo.jsonl").write_text(lines)
    usual = {"seed": 7, "ppo.kl_coef": 0.1}
    return build_report(run, state=State("running"), baseline=Baseline("a recipe", usual))


def ppo_row(step: int) -> dict[str, Any]:
    cut = step == CUT_AT
    return {
        "stage": "ppo",
        "step": step,
        "time": 1e9 + 60 * step,
        "objective/scores": None if cut else math.sin(step),
        "objective/kl": 0.5 + step,
        "loss/value_avg": 10.0 ** -(step % 4),
        "timing_s/generate": 2.0,
        "timing_s/update": 1.0,
        "timing_s/step": 3.0,
        "a/metric of one's own": float(step),
        "nonfinite": ["objective/scores"] if cut else [],
    }


def sample(step: int, n: int) -> dict[str, Any]:
    gain = 0.0 if step == 0 else n - 4.5
    before = f"answer {n} {EVIL}"
    now = before if step == 0 else f"better {n}"
    return {
        "step": step, "prompt": f"prompt {n} {EVIL}", "answer": now, "score": gain,
        "answer_before": before, "score_before": 0.0,
    }  # fmt: skip


@pytest.fixture
def opened(page: Page, report: Path) -> Iterator[Page]:
    """The report as it opens; afterwards it must have been quiet, alone and unharmed."""
    page.logged.clear()
    page.look(width=1200)
    page.open(report)
    yield page
    assert page.logged == []
    assert {url for url in page.requested if not url.startswith("data:")} == {report.as_uri()}
    assert page.evaluate("window.harmed") is None


def visible(page: Page) -> list[str]:
    script = "[...document.querySelectorAll('[role=tabpanel]')].filter(e => e.offsetParent)"
    return page.evaluate(f"{script}.map(e => e.id)")


def count(page: Page, selector: str) -> int:
    return page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def test_tabs_show_one_part_each_and_the_address_keeps_it(opened: Page) -> None:
    assert visible(opened) == ["overview"]
    for name in ("sft", "ppo", "samples", "config", "overview", "ppo"):
        opened.click(f"#tab-{name}")
        assert visible(opened) == [name]
    opened.evaluate("window.before = 1")
    opened.command("Page.reload")
    opened.wait_for("window.before === undefined && document.readyState === 'complete'")
    assert visible(opened) == ["ppo"]
    opened.evaluate("document.querySelector('#tab-ppo').focus()")
    opened.command("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert visible(opened) == ["samples"]


def test_hovering_shows_the_values_of_the_nearest_step(opened: Page) -> None:
    opened.click("#tab-ppo")
    opened.hover("#ppo .known .chart:nth-child(2) svg")
    opened.wait_for("document.querySelector('.tip') !== null")
    said = text(opened, ".tip")
    step = int(said.split()[1])
    assert abs(step - NUM_STEPS / 2) < 3
    assert f"{0.5 + step:g}" in said
    assert "objective/kl" in said
    opened.hover("h1")
    opened.wait_for("document.querySelector('.tip') === null")


def test_values_do_not_stay_when_a_chart_is_drawn_anew(opened: Page) -> None:
    opened.click("#tab-ppo")
    chart = "#ppo .known .chart:nth-child(2) svg"
    opened.hover(chart)
    opened.wait_for("document.querySelector('.tip') !== null")
    opened.evaluate(f"window.before = document.querySelector('{chart}')")
    opened.look(width=1000)
    opened.wait_for(f"document.querySelector('{chart}') !== window.before")
    opened.hover("h1")
    opened.wait_for("document.querySelector('.tip') === null")


def test_a_value_that_is_not_finite_breaks_the_line_and_is_said(opened: Page) -> None:
    opened.click("#tab-ppo")
    reward = "#ppo .known .chart:nth-child(1)"
    assert text(opened, f"{reward} figcaption").startswith("Reward")
    assert count(opened, f"{reward} path.raw") == 2
    assert "not finite: 1" in text(opened, reward)


def test_smoothing_is_for_all_stages_and_can_be_undone(opened: Page) -> None:
    opened.click("#tab-ppo")
    assert count(opened, "path.smoothed") == 0
    opened.click("#ppo .smooth")
    assert count(opened, "#ppo path.smoothed") > 3
    assert opened.evaluate("document.querySelector('#sft .smooth').checked")
    opened.click("#ppo .smooth")
    assert count(opened, "path.smoothed") == 0


def test_log_axis_and_time_axis(opened: Page) -> None:
    opened.click("#tab-ppo")
    values = "#ppo .known .chart:nth-child(3)"
    ticks = f"[...document.querySelectorAll('{values} svg text')].map(e => e.textContent)"
    assert text(opened, f"{values} figcaption").startswith("Value loss")
    assert {"0.001", "0.01", "0.1", "1"} <= set(opened.evaluate(ticks))
    opened.click(f"{values} .log")
    assert "0.001" not in opened.evaluate(ticks)
    opened.choose("#ppo .over", "minutes")
    assert "20 min" in opened.evaluate(ticks)


def test_metrics_that_nobody_knows_are_drawn_when_they_are_opened(opened: Page) -> None:
    opened.click("#tab-ppo")
    other = "#ppo .others"
    seen = f"document.querySelector('{other} path.raw')?.checkVisibility()"
    assert not opened.evaluate(seen)
    opened.click(f"{other} summary")
    opened.wait_for(seen)
    assert "a/metric of one's own" in text(opened, other)


def test_a_stage_of_one_point_has_its_dots(opened: Page) -> None:
    opened.click("#tab-sft")
    assert count(opened, "#sft circle") == 2


def test_samples_are_searched_filtered_and_sorted(opened: Page) -> None:
    opened.click("#tab-samples")
    prompts = "[...document.querySelectorAll('#sample-table tbody tr')].map(e => e.innerText)"
    assert len(opened.evaluate(prompts)) == 10
    opened.choose("#sample-filter", "up")
    opened.choose("#sample-order", "gain")
    rows = opened.evaluate(prompts)
    assert [row.split()[1] for row in rows] == ["9", "8", "7", "6", "5"]
    assert text(opened, "#sample-count") == (
        "5 of 10 samples; mean score 0 before, 2.5 at this step"
    )
    opened.type("#sample-search", "BETTER 7")
    assert [row.split()[1] for row in opened.evaluate(prompts)] == ["7"]
    assert text(opened, "#sample-table mark") == "better 7"
    assert EVIL in opened.evaluate(prompts)[0]


def test_samples_of_an_earlier_step(opened: Page) -> None:
    opened.click("#tab-samples")
    assert opened.evaluate("document.querySelector('#sample-step').value") == "29"
    opened.choose("#sample-step", "0")
    assert "better" not in text(opened, "#sample-table")
    opened.choose("#sample-filter", "changed")
    assert text(opened, "#sample-count") == "0 of 10 samples"


def test_only_the_settings_that_differ(opened: Page) -> None:
    opened.click("#tab-config")
    assert "seed: 7" in text(opened, ".settings")
    opened.click("#only-changed")
    shown = text(opened, ".settings")
    assert "seed" not in shown
    assert "kl_coef: 0.5" in shown


def test_a_chart_becomes_a_png(opened: Page) -> None:
    opened.click("#tab-ppo")
    # In one go: a scroll bar that comes between two calls changes the width.
    chart = "views.get('ppo')[0]"
    both = opened.evaluate(
        f"(async () => {{ const w = {chart}.width;"
        f" return JSON.stringify([await {chart}.png(), w]) }})()"
    )
    url, drawn = json.loads(both)
    raw = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert raw.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", raw[16:24])
    assert (width, height) == (2 * drawn, 2 * (210 + 36))


@pytest.mark.parametrize("tab", ["overview", "ppo", "samples", "config"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(opened: Page, width: int, tab: str) -> None:
    opened.look(width=width, dark=width == 360)
    opened.click(f"#tab-{tab}")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    dark = "rgb(20, 23, 27)"
    assert (opened.evaluate("getComputedStyle(document.body).backgroundColor") == dark) == (
        width == 360
    )


def test_it_keeps_its_place_when_it_is_loaded_anew(opened: Page) -> None:
    opened.click("#reload")
    opened.click("#tab-ppo")
    opened.click("#ppo .smooth")
    address = opened.evaluate("location.hash")
    assert set(address[1:].split("&")) == {"tab=ppo", "over=steps", "smooth=1", "reload=1"}
