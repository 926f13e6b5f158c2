"""Runs a notebook's code cells in order and saves what they show: no Jupyter needed.

    python scripts/run_notebook.py notebooks/quickstart.ipynb          # run, and save the outputs
    python scripts/run_notebook.py notebooks/quickstart.ipynb --check  # run, and print them alone

A cell is plain Python, or lines that begin with `!`, which a shell runs. What it prints and the
value of its last expression, as text, are its output. The first error ends the run with code 1, and
nothing is saved.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

type Cell = dict[str, Any]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one cell in nbformat's form."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        value = run_shell(source) if source.startswith("!") else run_python(source, name, namespace)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        text = said.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"output_type": "execute_result", "data": data, "metadata": {}})
    return outputs


def run_python(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Runs statements; the value of the last one where it is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), namespace)


def run_shell(source: str) -> None:
    """Runs lines behind `!`, with this Python in front of PATH; RuntimeError where one fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = ["bash", "-o", "pipefail", "-c", source.removeprefix("!").replace("\n!", "\n")]
    done = subprocess.run(
        command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {source}\n{done.stderr[-2000:]}")


def run_cells(cells: list[Cell]) -> int:
    """Runs the code cells, whose outputs it replaces; the exit code."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        try:
            outputs = run_cell("".join(cell["source"]), f"<cell {number}>", namespace)
        except Exception:  # whatever a cell does wrong ends the run, and is shown as it is
            print(f"code cell {number} failed:\n{traceback.format_exc()}", file=sys.stderr)
            return 1
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
            print("".join(output.get("text") or output["data"]["text/plain"]))
        cell |= {"outputs": outputs, "execution_count": number}
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="print the outputs, save nothing")
    args = parser.parse_args()
    notebook = json.loads(args.notebook.read_text(encoding="utf-8"))
    code = run_cells(notebook["cells"])
    if code == 0 and not args.check:
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        args.notebook.write_text(text + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
