"""Write the report of a run again: `python -m rlhf_jax.report runs/my-run`.

Every run keeps its report.html up to date by itself; this makes it of any run's directory, also of
one that goes on elsewhere or was killed. Exit codes: 0 written, 1 an error that the message
explains, 2 wrong flags.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

PROG = "python -m rlhf_jax.report"


@dataclass(frozen=True)
class ReportConfig:
    """Which run."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's directory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write report.html and say where it is."""
    cfg, more = tyro.cli(
        ReportConfig, prog=PROG, description=__doc__, args=argv, return_unknown_args=True
    )
    if more:
        print(
            f"error: {' '.join(more)}: the report takes the directory of one run and no flags. "
            "`python -m rlhf_jax.evaluate compare A B` compares the answers of two runs",
            file=sys.stderr,
        )
        return 2
    from rlhf_jax.recipes.nearest import nearest_recipe
    from rlhf_jax.runtime.report.page import build_report
    from rlhf_jax.runtime.report.reading import read_run

    try:
        baseline = nearest_recipe(read_run(cfg.run).config)
        print(build_report(cfg.run, baseline=baseline))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
