"""What a run leaves behind, and that it can be read back."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.cli import parse
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.inference.conversation import Turn
from rlhf_jax.inference.places import choose_form
from rlhf_jax.models.params import store_layout
from rlhf_jax.stages.run import startable

METRICS = Path(__file__).parent / "metrics.txt"


def test_metric_names_are_frozen(unbroken) -> None:
    """A name that comes, goes or changes is a change of the interface: look at the diff.

    PPO's are those of TRL (`objective/kl`, `policy/clipfrac_avg` …) and a few more.
    """
    found = {
        f"{stage}  {name}"
        for (stage, _), row in unbroken.metrics().items()
        for name in row
        if name not in ("stage", "step", "time")
    }
    assert sorted(found) == METRICS.read_text().splitlines()


@pytest.mark.parametrize("name", ["sft", "reward", "actor", "critic"])
def test_every_model_says_how_it_was_asked(unbroken, name) -> None:
    """Away from the run too; the built-in data write their prompts so."""
    model = find_pretrained(str(unbroken.directory / name), scalar=name in ("reward", "critic"))
    form = choose_form(model.tokenizer, "elsewhere")
    (_, prompt), *_ = unbroken.answers()
    asked = prompt.removeprefix("Human: ").removesuffix(" Assistant:")
    assert asked != prompt
    assert form.encode([Turn(asked)], "") == model.tokenizer.encode(prompt)
    assert not form.note


def test_every_step_of_every_stage_is_logged(unbroken) -> None:
    steps = {"sft": 4, "reward": 4, "ppo": 3}
    wanted = {(stage, step) for stage, last in steps.items() for step in range(last + 1)}
    assert set(unbroken.metrics()) == wanted


def test_the_sampler_and_the_training_graph_agree(unbroken) -> None:
    """Float32: their log-probabilities of the same tokens differ by rounding alone."""
    ppo = [row for (stage, step), row in unbroken.metrics().items() if stage == "ppo" and step]
    assert len(ppo) == 3
    for row in ppo:
        assert row["rollout/logprob_diff_mean"] < 1e-5
        assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)


def test_the_saved_config_starts_the_same_run_elsewhere(small, unbroken, tmp_path) -> None:
    elsewhere = f"--output-dir={tmp_path}"
    saved = parse([f"--config={unbroken.directory / 'config.yaml'}", elsewhere])
    assert saved == small(tmp_path, {"mesh": "4x2"})


def test_a_config_saved_by_a_resumed_run_starts_one_too() -> None:
    assert startable("resume: true\noverwrite_output_dir: false\nseed: 1\n") == (
        "resume: false\noverwrite_output_dir: false\nseed: 1\n"
    )


def test_the_summary_holds_the_results_of_every_stage(unbroken) -> None:
    summary = json.loads((unbroken.directory / "summary.json").read_text())
    assert list(summary) == ["sft", "reward", "ppo"]
    assert summary["sft"]["eval/perplexity"] > 1
    assert 0 <= summary["reward"]["eval/accuracy"] <= 1
    assert {results["held_out_rows"] for results in summary.values()} == {8}
    for when in ("before", "after"):
        shares = summary["ppo"][when]["judged"]["sampled"]["all"]
        assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["sft", "actor", "reward", "critic"])
def test_exported_models_load_back(unbroken, name: str) -> None:
    """As what they are, with the tokenizer; true sizes come back padded as before."""
    model = find_pretrained(str(unbroken.directory / name))
    scalar = name in ("reward", "critic")
    assert model.is_scalar == scalar
    assert model.tokenizer.encode("count a") == find_pretrained("quickstart").tokenizer.encode(
        "count a"
    )
    layout = store_layout(model.cfg, make_mesh(parse_mesh("1x1"), 1))
    read = model.scalar_model if scalar else model.params
    params = read(layout, jnp.dtype("float32"), key=jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_training_changed_the_actor_and_the_critic(unbroken) -> None:
    def weights(name: str) -> bytes:
        return (unbroken.directory / name / "model.safetensors").read_bytes()

    assert weights("actor") != weights("sft")
    assert weights("critic") != weights("reward")


def test_samples_hold_prompt_and_answers_before_and_after(unbroken) -> None:
    lines = (unbroken.directory / "samples" / "ppo.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["step"] for row in rows} == {0, 3}
    first = {row["prompt"]: row["answer"] for row in rows if row["step"] == 0}
    assert len(first) == 8
    for row in rows:
        assert row["answer_before"] == first[row["prompt"]]
        assert isinstance(row["score"], float)
