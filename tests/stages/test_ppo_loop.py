"""What the loop of step 3 hands from one program to the next, with programs that only count."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.batches import PromptBatch
from rlhf_jax.engine.ema import EMAConfig
from rlhf_jax.stages.ppo import Programs, collect, update
from rlhf_jax.stages.ppo import means as means_of
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ppo_rows import Scored
from rlhf_jax.stages.roles import Roles
from tests.engine.drive import Driver, prompts
from tests.models.cases import OPT

ENGINE = Driver(OPT).engine
DEALT = Driver(OPT, "2x1").engine


@contextmanager
def phase(name: str):
    del name
    yield []


def run_of(cfg: PPOConfig) -> Any:
    return SimpleNamespace(
        cfg=SimpleNamespace(ppo=cfg, seed=0),
        timer=SimpleNamespace(phase=phase),
        key=lambda step, purpose: (step, purpose),
    )


def roles(actor: Any) -> Roles:
    """The actor is whatever the programs make of it."""
    critic: Any = SimpleNamespace(params=None)
    reference: Any = None
    return Roles(actor=actor, critic=critic, reference=reference, reward=None)


@pytest.mark.parametrize(
    ("per", "seen"), [("minibatch", [1, 2, 3, 4, 5, 6, 7, 8]), ("iteration", [4, 8])]
)
def test_every_update_reads_text_of_its_own_and_the_average_follows_as_often_as_told(per, seen):
    """Two iterations of two epochs of two minibatches; the average reads the updated actor."""
    cfg = PPOConfig(
        batch_size=8, minibatch_size=4, ppo_epochs=2, ptx_coef=1.0, ptx_path="text",
        ema=EMAConfig(enable=True, per=per),
    )  # fmt: skip
    texts, averaged = [], []

    def step(actor, critic, experience, rows, stopped, text, **kept):
        del experience, rows, kept
        texts.append(int(text))
        return actor + 1, critic, stopped, {"val/skipped": 0.0, "val/stopped": 0.0}

    def average(ema, actor, taken=True):
        assert taken
        averaged.append(actor)
        return [*ema, actor]

    programs = Programs(score=None, score_evaluation=None, update=step, average=average)
    data: Any = SimpleNamespace(ptx=SimpleNamespace(batch=np.int32), max_prompt=6)
    experience: Any = "experience"
    batches = [Scored(experience, np.ones(8, np.float32))]
    now, ema = roles(0), cast(Any, [])
    for iteration in range(2):
        now, ema, losses = update(
            run_of(cfg), now, ema, ENGINE, programs, data, batches, iteration
        )  # fmt: skip
        assert len(losses) == cfg.updates_per_iteration
    assert texts == list(range(8))
    assert averaged == ema == seen


def test_batches_of_an_iteration_are_new_and_each_hands_its_control_to_the_next():
    cfg = PPOConfig(batch_size=8, generation_batches=3)
    asked, keys = [], []

    def batch(number: int) -> Any:
        asked.append(number)
        return replace(prompts(), sample_ids_B=np.full(8, number, np.int32))

    def generate(policy, rows, sampling, *, key):
        del policy, sampling
        keys.append(key)
        return rows.sample_ids_B

    def score(scorers, rows, rollout, extra, control, places):
        del scorers, extra
        assert places is None
        np.testing.assert_array_equal(rows.sample_ids_B, rollout)
        return int(rollout[0]), control + 1, {"control": jnp.float32(control)}

    programs = Programs(score=score, score_evaluation=None, update=None, average=None)
    engine: Any = SimpleNamespace(compute=ENGINE.compute, generate=generate)
    host: Any = SimpleNamespace(score=lambda *args: None, metrics=lambda scored: {})
    data: Any = SimpleNamespace(train=SimpleNamespace(batch=batch), rows={}, max_prompt=6)
    control: Any = 10
    actor = roles(SimpleNamespace(params=None))
    with jax.set_mesh(ENGINE.mesh):
        batches, control, metrics = collect(
            run_of(cfg), actor, control, engine, programs, host, data, 2
        )
    assert asked == [scored.experience for scored in batches] == [6, 7, 8]
    assert len(set(keys)) == 3
    assert control == 13
    assert metrics["control"] == 11


def test_a_batch_counts_by_its_answers() -> None:
    rows = [{"kl": 1.0, "length/min": 3.0, "length/max": 5.0, "length/mean": 4.0}]
    rows += [{"kl": 9.0, "length/min": 2.0, "length/max": 2.0, "length/mean": 2.0}]
    means = means_of([jax.tree.map(jnp.float32, row) for row in rows], [16, 1])
    want = {"kl": 25 / 17, "length/min": 2, "length/max": 5, "length/mean": 66 / 17}
    assert {name: float(value) for name, value in means.items()} == pytest.approx(want)


@pytest.mark.parametrize("untaken", ["val/skipped", "val/stopped"])
def test_the_average_takes_no_step_that_the_actor_did_not_take(untaken: str) -> None:
    cfg = PPOConfig(batch_size=8, minibatch_size=2, ema=EMAConfig(enable=True, per="minibatch"))
    seen = []

    def step(actor, critic, experience, rows, stopped, text, **kept):
        del experience, rows, text, kept
        losses = {"val/skipped": 0.0, "val/stopped": 0.0}
        return actor + 1, critic, stopped, losses | {untaken: float(actor == 1)}

    def average(ema, actor, taken):
        seen.append((actor, taken))
        return ema

    programs = Programs(score=None, score_evaluation=None, update=step, average=average)
    data: Any = SimpleNamespace(ptx=None, max_prompt=6)
    experience: Any = "experience"
    batches = [Scored(experience, np.ones(8, np.float32))]
    update(run_of(cfg), roles(0), cast(Any, []), ENGINE, programs, data, batches, 0)
    assert seen == [(1, True), (2, False), (3, True), (4, True)]


def test_packed_rows_are_scored_and_trained_where_their_own_tokens_stand():
    """Of two generated batches, in an order that is drawn and then dealt out."""
    cfg = PPOConfig(
        batch_size=32, minibatch_size=16, generation_batches=2, max_answer_seq_len=12, packing=True
    )
    lengths, seen = {}, []

    def batch(number: int) -> PromptBatch:
        asked = np.random.default_rng(number).integers(1, 5, 32).astype(np.int32)
        lengths[number] = asked + np.arange(32) % 12 + 1
        ids = np.full(32, number, np.int32)
        return PromptBatch(np.zeros((32, 8), np.int32), asked, ids, np.ones(32, np.float32))

    def generate(policy, rows, sampling, *, key):
        del policy, sampling, key
        answers = lengths[int(rows.sample_ids_B[0])] - rows.lengths_B
        return SimpleNamespace(tokens_BR=np.zeros((32, 12)), lengths_B=jnp.asarray(answers))

    def score(scorers, rows, rollout, extra, control, places):
        del scorers, rollout, extra
        number = int(np.asarray(rows.sample_ids_B)[0])
        np.testing.assert_array_equal(places.lengths_B, lengths[number][places.rows_B])
        width = rows.tokens_BP.shape[1] + 12
        return SimpleNamespace(number=number, tokens_BT=np.zeros((32, width))), control, {}

    def step(actor, critic, experience, rows, stopped, text, *, places, **kept):
        del text, kept
        np.testing.assert_array_equal(places.lengths_B, lengths[experience.number][rows])
        seen.extend((experience.number, int(row)) for row in rows)
        return actor, critic, stopped, {}

    programs = Programs(score=score, score_evaluation=None, update=step, average=None)
    engine: Any = SimpleNamespace(compute=DEALT.compute, generate=generate)
    host: Any = SimpleNamespace(score=lambda *args: None, metrics=lambda scored: {})
    data: Any = SimpleNamespace(
        train=SimpleNamespace(batch=batch), rows={}, ptx=None, max_prompt=12
    )
    run, now, control = run_of(cfg), roles(SimpleNamespace(params=None)), cast(Any, 0)
    with jax.set_mesh(DEALT.mesh):
        batches, _, metrics = collect(run, now, control, engine, programs, host, data, 0)
        _, _, losses = update(run, now, None, engine, programs, data, batches, 0)
    assert sorted(seen) == [(number, row) for number in range(2) for row in range(32)]
    # Of rows of their bucket in scoring and in updates, whatever is the widest.
    assert metrics["perf/score_tokens_saved"] > 0.2
    assert all(each["perf/update_tokens_saved"] > 0.2 for each in losses)
