"""A packed step equals the step on the same rows one by one: losses, metrics and gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.layout import make_mesh, parse_mesh
from meshes.reshard import put_batch
from rlhf_jax.data.batches import collate_pairs, collate_text
from rlhf_jax.data.blend import DataConfig
from rlhf_jax.data.packing import Packing, collate_packed, collate_packed_pairs
from rlhf_jax.data.tokenize import PairRow, SftRow
from rlhf_jax.engine.step import gradients
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.recipes.quickstart import quickstart
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.reward import num_pairs, pair_batch_loss, reward_data
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss, sft_data
from rlhf_jax.stages.supervised_config import RewardConfig, SFTConfig
from tests.engine.drive import Driver, to_numpy
from tests.models.cases import LLAMA, OPT

LENGTH = 24
LLAMA_LAYER = replace(LLAMA, num_layers=1)
ANSWERS = SFTConfig(loss_on="completion")
RUNS = [
    pytest.param(OPT, SFTConfig(), "4x2", np.float32, id="learned_positions_4x2"),
    pytest.param(OPT, ANSWERS, "1x1", jnp.bfloat16, id="learned_positions_bf16"),
    pytest.param(LLAMA_LAYER, ANSWERS, "1x1", np.float32, id="rope_gqa"),
]


def tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(3, 99, length).astype(np.int32)


def sft_rows() -> list[SftRow]:
    rng = np.random.default_rng(3)
    return [SftRow(tokens(rng, n), n // 3) for n in (24, 13, 9, 8, 7, 5, 5, 4, 3, 2, 2, 1)]


def pairs() -> list[PairRow]:
    rng = np.random.default_rng(4)
    sizes = [(12, 12), (7, 9), (3, 4), (2, 5), (5, 2), (1, 2), (6, 3), (4, 4)]
    return [
        PairRow(tokens(rng, a), tokens(rng, b), 1, margin=n / 4) for n, (a, b) in enumerate(sizes)
    ]


def packed(rows: list[Any], lengths: list[int]) -> tuple[Packing, list[list[Any]]]:
    """The rows in sequences, of which one at least holds three."""
    packing = Packing(np.array(lengths), LENGTH)
    assert packing.most_rows >= 3
    assert packing.num_sequences < len(rows)
    return packing, [[rows[n] for n in each] for each in packing.pack(np.arange(len(rows)))]


def step(
    driver: Driver, params: Any, loss: Callable[..., Any], weight: Any, batch: Any, parts: int
) -> tuple[Any, float, dict[str, float]]:
    run = driver.jit(partial(gradients, loss, weight_fn=weight, num_parts=parts))
    return to_numpy(run(params, put_batch(batch, driver.engine.compute)))


def assert_equal_steps(got: Any, want: Any, tolerance: Any, dtype: Any) -> None:
    """Gradients against the largest of each array (single entries may cancel to nothing), and
    where a whole array cancels against a share of the largest of all.
    """
    (got_grads, *got_rest), (want_grads, *want_rest) = got, want
    for a, b in zip(jax.tree.leaves(got_rest), jax.tree.leaves(want_rest), strict=True):
        np.testing.assert_allclose(a, b, **tolerance(dtype))
    floor = 0.05 * max(np.abs(grad).max() for grad in jax.tree.leaves(want_grads))
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        largest = max(np.abs(b).max(), floor)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance(dtype)["atol"] * largest)


@pytest.mark.parametrize(("model", "cfg", "mesh", "dtype"), RUNS)
def test_sft_loss_and_gradients(
    model: ModelConfig, cfg: SFTConfig, mesh: str, dtype: Any, tolerance
) -> None:
    rows = sft_rows()
    driver = Driver(model, mesh, inference_tp=int(mesh[-1]), dtype=dtype)
    loss = partial(sft_batch_loss, cfg=cfg, model=model, layout=driver.engine.compute)
    weight = partial(num_predictions, loss_on=cfg.loss_on)
    _, sequences = packed(rows, [len(row.tokens) for row in rows])
    batch = collate_packed(sequences, 8, length=LENGTH, answers_only=cfg.loss_on == "completion")
    params, parts = driver.actor(), 2 if mesh == "4x2" else 1
    got = step(driver, params, loss, weight, batch, parts)
    alone = step(driver, params, loss, weight, collate_text(rows, 16, length=LENGTH), parts)
    assert_equal_steps(got, alone, tolerance, dtype)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="packing compares scores at the last tokens and span is"):
        RewardConfig(packing=True, span="divergence")
    data = DataConfig(data_path=("a", "b"), data_weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="sft.packing needs the same rows in every epoch"):
        TrainConfig(data=data, sft=SFTConfig(packing=True))
    TrainConfig(step=(2,), data=data, sft=SFTConfig(packing=True))


@pytest.mark.parametrize(
    ("stage", "data_of", "one"), [("sft", sft_data, "row"), ("reward", reward_data, "pair")]
)
def test_a_step_has_its_rows_on_average_and_held_out_batches_stay(
    tmp_path: Path, stage: str, data_of: Any, one: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart's rows, 8 devices, batches in 2 parts: sequences in multiples of 16."""
    base, model = quickstart(), find_pretrained("quickstart")
    settings = replace(
        getattr(base, stage), packing=True, batch_size=64, gradient_accumulation_steps=2
    )
    mesh = make_mesh(parse_mesh("8x1"), 1)
    plain, packed = (
        data_of(
            SimpleNamespace(cfg=replace(base, **{stage: each}), mesh=mesh, directory=tmp_path),
            model,
        )
        for each in (replace(settings, packing=False), settings)
    )
    jax.tree.map(np.testing.assert_array_equal, packed[1], plain[1])
    loader = packed[0]
    assert loader.batch_size % 16 == 0
    batch = loader.batch(0)
    assert batch.tokens_BT.shape[0] == loader.batch_size
    rows = loader.num_rows / loader.num_batches
    assert 0.6 * 64 < rows < 1.4 * 64
    assert f"{stage}: {loader.num_rows} {one}s packed into" in capsys.readouterr().out


def test_reward_loss_and_gradients(tolerance) -> None:
    model, rows = OPT, pairs()
    driver = Driver(model, "4x2", inference_tp=2)
    loss = partial(pair_batch_loss, cfg=RewardConfig(), model=model, layout=driver.engine.compute)
    packing, sequences = packed(rows, [len(row.chosen) + len(row.rejected) for row in rows])
    batch = collate_packed_pairs(sequences, 8, length=LENGTH, most_pairs=packing.most_rows)
    params = driver.scalar(2)
    got = step(driver, params, loss, num_pairs, batch, 2)
    alone = step(driver, params, loss, num_pairs, collate_pairs(rows, 8, length=LENGTH), 2)
    assert_equal_steps(got, alone, tolerance, np.float32)
