"""`--step 1 dpo`: what it leaves, on every mesh, with the reference on the host, and resumed."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from rlhf_jax.inference.places import find_policy
from rlhf_jax.stages import dpo
from rlhf_jax.stages.run import Run

SMALL: dict[str, object] = {
    "step": (1, "dpo"),
    "mesh": "4x2",
    "dpo.batch_size": 8,
    "dpo.max_steps": 4,
    "dpo.num_warmup_steps": 0,
    "dpo.num_eval_prompts": 12,
}
TRL_NAMES = {
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
}


@pytest.fixture(scope="module")
def trained(small, run, tmp_path_factory: pytest.TempPathFactory):
    """Four steps of SFT and four of DPO on 4x2."""
    return run(small(tmp_path_factory.mktemp("dpo") / "run", SMALL))


def dpo_rows(outcome) -> dict[tuple[str, int], dict[str, float]]:
    return {key: row for key, row in outcome.metrics().items() if key[0] == "dpo"}


def test_it_leaves_a_policy_that_chat_finds_and_numbers_by_trls_names(trained) -> None:
    directory: Path = trained.directory
    assert find_policy(str(directory)) == str(directory / "dpo")
    rows = dpo_rows(trained)
    assert set(rows[("dpo", 1)]) >= TRL_NAMES
    assert set(rows[("dpo", 4)]) >= {f"eval/{name}" for name in TRL_NAMES}
    summary = json.loads((directory / "summary.json").read_text())["dpo"]
    for how in ("sampled", "greedy"):
        shares = [summary[when]["judged"][how]["all"] for when in ("before", "after")]
        assert [sum(share.values()) for share in shares] == pytest.approx([1, 1])
    samples = (directory / "samples" / "dpo.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in samples} == {0, 4}


def test_it_starts_at_the_reference_and_learns_the_pairs(trained) -> None:
    rows = dpo_rows(trained)
    assert rows[("dpo", 0)]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[("dpo", 0)]["eval/rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert rows[("dpo", 4)]["eval/loss"] < math.log(2)
    assert rows[("dpo", 4)]["eval/rewards/margins"] > 0


def test_the_same_on_another_mesh_with_the_reference_on_the_host_and_resumed(
    trained, small, run, same_metrics, monkeypatch, tmp_path
) -> None:
    log = Run.log

    def log_and_press(self, stage, step, metrics):
        values = log(self, stage, step, metrics)
        if step == 2 and not self.interrupted:
            signal.raise_signal(signal.SIGINT)
        return values

    changes = SMALL | {
        "step": ("dpo",),
        "mesh": "8x1",
        "actor_model": str(trained.directory / "sft"),
        "dpo.offload_reference_model": True,
    }
    cfg = small(tmp_path / "run", changes)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_press)
        with pytest.raises(KeyboardInterrupt):
            run(cfg)
    assert (tmp_path / "run" / "checkpoints" / "dpo" / "2").is_dir()
    resumed = run(replace(cfg, resume=True))
    same_metrics(dpo_rows(trained), dpo_rows(resumed), rtol=1e-3, atol=1e-4)


@pytest.fixture
def reference_kinds(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Where the reference models of the runs that follow lie."""
    kinds: list[set[str]] = []
    load = dpo.load_frozen

    def remember(*args, **kwargs):
        frozen = load(*args, **kwargs)
        kinds.append({f"{x.sharding.memory_kind}/{x.dtype}" for x in jax.tree.leaves(frozen)})
        return frozen

    monkeypatch.setattr(dpo, "load_frozen", remember)
    return kinds


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (
            {"dpo.offload_reference_model": True, "dpo.frozen_dtype": "bfloat16"},
            {"pinned_host/bfloat16"},
            "",
        ),
        (
            {"dpo.offload_reference_model": True, "dpo.lora.dim": 2, "dpo.lora.only": True},
            {"device/float32"},
            "not offloaded, it is the base of the adapters",
        ),
    ],
    ids=["other dtype", "lora"],
)
def test_where_the_reference_lies(
    trained, small, run, reference_kinds, capsys, tmp_path, changes, where, said
) -> None:
    """One step; with adapters alone the base serves as the reference, and stays as it was."""
    more = {"step": ("dpo",), "actor_model": str(trained.directory / "sft"), "dpo.max_steps": 1}
    outcome = run(small(tmp_path / "run", SMALL | more | changes))
    assert reference_kinds == [where]
    assert said in capsys.readouterr().out
    first = dpo_rows(outcome)[("dpo", 0)]["eval/loss"]
    rounding = 1e-2 if "dpo.frozen_dtype" in changes else 1e-6
    assert first == pytest.approx(math.log(2), abs=rounding)


def test_it_takes_the_place_of_steps_2_and_3(small) -> None:
    with pytest.raises(ValueError, match="dpo takes the place of steps 2 and 3: use --step 1 dpo"):
        small(Path("run"), {"step": (1, 2, "dpo")})
    with pytest.raises(ValueError, match="each stage once and in order, got dpo 1"):
        small(Path("run"), {"step": ("dpo", 1)})
