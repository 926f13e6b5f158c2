"""The programs of docs/python_api.md run as they stand: in order, in one process, with
the quickstart's model where a run leaves its own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

import rlhf_jax
from rlhf_jax.hf.export import save_reward_hf
from rlhf_jax.inference.ppo import headed
from rlhf_jax.models.params import Params
from tests.notebooks.test_tutorials import fenced


def write_run(directory: Path) -> None:
    """Untrained models where the quickstart leaves its own; `load` reads them."""
    model = rlhf_jax.load("quickstart", mesh="1x1")
    assert isinstance(model.params, Params)
    model.save_hf(directory / "actor")
    scorer, reward = headed(model.params), directory / "reward"
    save_reward_hf(reward, scorer, model.config, "float32", model.tokenizer)
    (reward / "score_statistics.json").write_text(json.dumps({"mean": 0.0, "std": 1.0}))


def test_the_programs_run_in_order(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/quickstart"))
    names: dict[str, Any] = {}
    for program in fenced("python_api", "python"):
        exec(compile(program, "python_api.md", "exec"), names)
    assert capsys.readouterr().out, "the streamed answer"
    assert len(names["answers"]) == 8
    assert names["ppo"].num_steps == 20
    assert np.isfinite(names["metrics"]["loss/policy_avg"])
