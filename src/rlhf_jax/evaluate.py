"""Measure trained models: `python -m rlhf_jax.evaluate {compare,reward,perplexity} --help`.

Tables go to stdout, everything also as JSON to --output. Exit codes: 0 done, 1 an error that the
message explains, 2 wrong flags, 130 interrupted.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

PROG = "python -m rlhf_jax.evaluate"
TRACEBACK = "RLHF_JAX_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    code = 2
    try:
        import tyro

        from rlhf_jax.evaluation.config import Command

        cfg: Any = tyro.cli(Command, prog=PROG, description=__doc__, args=argv)  # pyright: ignore
        code = 1
        evaluate(cfg)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def evaluate(cfg: Any) -> None:
    """The report of a command, as tables and as JSON."""
    from rlhf_jax.evaluation import tables
    from rlhf_jax.evaluation.compare import evaluate_compare
    from rlhf_jax.evaluation.config import Compare, Reward
    from rlhf_jax.evaluation.pairs import evaluate_reward
    from rlhf_jax.evaluation.perplexity import evaluate_perplexity
    from rlhf_jax.inference.dtypes import full_dtype

    cfg = replace(cfg, dtype=full_dtype(cfg.dtype))  # reports name it in full
    target = check_output(cfg.output)
    if isinstance(cfg, Compare):
        report = evaluate_compare(cfg)
        tables.show_compare(report, cfg.shown)
    elif isinstance(cfg, Reward):
        report = evaluate_reward(cfg)
        tables.show_reward(report)
    else:
        report = evaluate_perplexity(cfg)
        tables.show_perplexity(report)
    if target is not None:
        text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
        target.write_text(text + "\n", encoding="utf-8")


def check_output(output: str | None) -> Path | None:
    """Where the JSON goes; before anything runs a ValueError where it cannot be written there."""
    if output is None:
        return None
    target = Path(output).expanduser()
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"--output={output} must be a file in a directory that exists")
    return target


if __name__ == "__main__":
    sys.exit(main())
