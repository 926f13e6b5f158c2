r"""Measure runs of one recipe and write their page: docs/runs/NAME.md, NAME.svg and NAME.json.

    python scripts/run_page.py runs/hh-0 runs/hh-1 runs/hh-2 --page docs/runs/smollm2-hh.md \
        --text data/text/wikitext-2-test.txt.gz
    python scripts/run_page.py runs/hh-0 --text FILE --flags --actor-model=models/smollm2

Each run's results go to measured.json in its directory, and are read from there where they are:
a GPU is needed once, and not where the page is written. `--again` measures anew. `--flags` are
training flags over those of config.yaml, for models and data that lie elsewhere now.
docs/runs/README.md says what is measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

from rlhf_jax.evaluation.course import course
from rlhf_jax.evaluation.course_svg import picture
from rlhf_jax.evaluation.run_page import page_with
from rlhf_jax.evaluation.runs import Settings, measure_run
from rlhf_jax.inference.session import LoadDtype
from rlhf_jax.runtime.report.reading import read_run
from rlhf_jax.stages.run import METRICS_FILE

MEASURED = "measured.json"


def main() -> None:
    args = arguments()
    settings = Settings(
        text=args.text,
        max_rows=args.max_rows,
        flags=tuple(args.flags),
        batch_size=args.batch_size,
        mesh=args.mesh,
        dtype=args.dtype,
    )
    try:
        runs = [measured(run, settings, again=args.again) for run in args.runs]
        if args.page is not None:
            write_page(runs, args.page)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure runs of a recipe and write their page.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, help="the .md to write; .svg and .json beside it")
    parser.add_argument("--text", help="running text for the perplexity")
    parser.add_argument("--max-rows", type=int, help="only the first held-out rows")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--dtype", choices=get_args(LoadDtype), default="float32")
    parser.add_argument("--again", action="store_true", help=f"although {MEASURED} is there")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[])
    return parser.parse_args()


def measured(run: Path, settings: Settings, *, again: bool) -> dict[str, Any]:
    """The results of a run, from its directory where they are there; its curves from its metrics,
    if they are there.
    """
    file = run / MEASURED
    if not file.exists() or again:
        text = json.dumps(measure_run(run, settings), indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    print(f"{file}: measured")
    found = json.loads(file.read_text(encoding="utf-8"))
    return found | {"course": course(read_run(run))} if (run / METRICS_FILE).exists() else found


def write_page(runs: list[dict[str, Any]], page: Path) -> None:
    """The page around whose tables people may write, its curves, and everything as JSON."""
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    curves = picture(runs, page.stem)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_with(runs, before, page.stem), encoding="utf-8")
    page.with_suffix(".svg").write_text(curves, encoding="utf-8")
    text = json.dumps(runs, indent=1, ensure_ascii=False) + "\n"
    page.with_suffix(".json").write_text(text, encoding="utf-8")
    print(f"{page}: written")


if __name__ == "__main__":
    main()
