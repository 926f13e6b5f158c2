"""From a model's name to a local directory: a path, or a model of the Hugging Face Hub."""

import difflib
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from rlhf_jax.hf.gguf import find_gguf, is_gguf, open_gguf
from rlhf_jax.models.families import SIZES

CONFIG_FILES = [
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
]
SAFETENSORS = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_model.bin"]


def resolve(name: str) -> Path:
    """The directory or GGUF file of a model: `name` as a local path first, then on the Hub.

    Of the Hub only config, tokenizer and weights are fetched, safetensors where there are any.
    Raises ValueError with what was tried, and the nearest published name.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        open_gguf(path)
        return path
    if path.is_dir():
        if not is_model(path):
            if gguf := find_gguf(path):
                return gguf
            raise FileNotFoundError(
                f"{path} has no config.json and no GGUF file: it is no model{inside(path)}"
            )
        return path
    what = "a file that is no GGUF file" if path.is_file() else "no such directory"
    here = f"{what} ({path.absolute()})"
    try:
        directory = Path(snapshot_download(name, allow_patterns=CONFIG_FILES + SAFETENSORS))
        if not list(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(name, allow_patterns=CONFIG_FILES + PICKLES))
    except HFValidationError as error:
        raise ValueError(
            f"there is no model {name!r}: {here}, and no name of the Hugging Face Hub either: "
            f"those are written owner/name{suggest(name)}"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"there is no model {name!r}: {here}, and the Hugging Face Hub says: {reason}"
            f"{suggest(name)}"
        ) from error
    if not is_model(directory):
        raise ValueError(f"{name} on the Hugging Face Hub has no config.json: it is not a model")
    return directory


def is_model(directory: Path) -> bool:
    """Whether a directory holds a model, or an adapter for one."""
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def inside(directory: Path) -> str:
    """The models in a directory that is none, such as a run's, as the end of a sentence."""
    models = [str(path) for path in sorted(directory.iterdir()) if is_model(path)]
    return f". It holds models: use {' or '.join(models[:8])}" if models else ""


def suggest(name: str) -> str:
    """The published names nearest to `name`, as the end of a sentence."""
    whole = {known.lower(): known for known in SIZES}
    short = {known.lower().split("/")[-1]: known for known in SIZES}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, whole, n=1, cutoff=0.6)
    found = [whole[key] for key in near]
    near = difflib.get_close_matches(wanted.split("/")[-1], short, n=1, cutoff=0.6)
    found = found or [short[key] for key in near]
    return f". Did you mean {found[0]}?" if found and found[0] != name else ""
