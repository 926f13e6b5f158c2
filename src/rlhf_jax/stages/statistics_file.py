"""The scale of a reward model's scores: mean and deviation, in a file beside it."""

import json
from pathlib import Path

import jax

from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.objectives.losses import Metrics
from rlhf_jax.runtime.disk import replace_text

STATISTICS_FILE = "score_statistics.json"


def write_statistics(directory: Path, means: Metrics) -> None:
    """Mean and deviation of the scores of training answers, beside the model."""
    values = {name: float(value) for name, value in jax.device_get(means).items()}
    mean = (values["score_chosen"] + values["score_rejected"]) / 2
    deviation = max(values["score_square"] - mean**2, 1e-12) ** 0.5
    if jax.process_index() == 0:
        text = json.dumps({"mean": mean, "std": deviation})
        replace_text(directory / STATISTICS_FILE, text + "\n")


def statistics_path(model: Pretrained) -> Path | None:
    """Where a reward model's statistics are; None where it came without them."""
    path = model.home / STATISTICS_FILE if model.home else None
    return path if path is not None and path.exists() else None


def keep_statistics(model: Pretrained, directory: Path) -> None:
    """Puts the statistics of a reward model beside a copy of it; without any, none stay there."""
    if jax.process_index() != 0:
        return
    path = statistics_path(model)
    if path is None:
        (directory / STATISTICS_FILE).unlink(missing_ok=True)
    else:
        replace_text(directory / STATISTICS_FILE, path.read_text(encoding="utf-8"))


def read_statistics(model: Pretrained) -> tuple[float, float]:
    """Mean and deviation of a reward model's scores; ValueError where it came without them."""
    path = statistics_path(model)
    if path is None:
        raise ValueError(
            f"the reward model {model.name} has no {STATISTICS_FILE}, which step 2 writes: train "
            "it with step 2, or use its scores as they are with --ppo.no-standardize-score"
        )
    values = json.loads(path.read_text(encoding="utf-8"))
    return values["mean"], values["std"]
