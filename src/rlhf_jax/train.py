"""The three stages of RLHF from one command: `python -m rlhf_jax.train --help`.

Exit codes: 0 done, 1 the run failed for a reason that the message gives, 2 wrong flags or config,
130 stopped by ctrl-C, 143 by SIGTERM. `RLHF_JAX_TRACEBACK=1` shows where an error came from.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rlhf_jax.runtime.signals import NAMES, Stopped

TRACEBACK = "RLHF_JAX_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags (`sys.argv[1:]` by default) and run the stages that they ask for."""
    code = 2
    os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"  # of several processes it hides SIGTERM
    try:
        from rlhf_jax.cli import parse, to_yaml

        config = parse(argv)
        code = 1
        from meshes.multihost import ending_alone
        from rlhf_jax.recipes.nearest import nearest_recipe
        from rlhf_jax.stages.pipeline import run_pipeline

        with ending_alone():
            run_pipeline(config, to_yaml(config), nearest_recipe(asdict(config)))
    except BrokenPipeError:  # the reader of a pipe has seen enough: train --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        if code == 1:
            print(f"({TRACEBACK}=1 shows where it was raised)", file=sys.stderr)
        return code
    except Stopped as stopped:
        return leave(stopped)
    except Exception as error:
        if os.environ.get(TRACEBACK) == "1" or not out_of_memory(error):
            raise
        print(
            "error: a device is out of memory: smaller batches, more gradient accumulation, "
            f"remat=full or a larger --mesh; docs/troubleshooting.md#out-of-memory. JAX says: "
            f"{str(error).splitlines()[0]}\n({TRACEBACK}=1 shows where it was raised)",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def out_of_memory(error: Exception) -> bool:
    """Whether XLA could not allocate; its errors are of one type and differ in their text."""
    text = str(error)
    return type(error).__name__ == "JaxRuntimeError" and (
        "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
    )


def leave(stopped: Stopped) -> int:
    """The exit code of a run that a signal has stopped."""
    for signum in NAMES:  # one more of them would only change the exit code
        signal.signal(signum, signal.SIG_IGN)
    print("interrupted", file=sys.stderr)
    if stopped.at_once:
        # A thread that still writes a checkpoint would abort the interpreter as it ends.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stopped.code)
    return stopped.code


if __name__ == "__main__":
    sys.exit(main())
