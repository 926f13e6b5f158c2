"""The pretraining text of PPO: which rows an update sees, and what is refused beforehand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_jax.data.blend import DataConfig
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.stages.checks import check_data
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.ptx import ptx_loader
from rlhf_jax.stages.run import check_keeps_inputs

ACTOR = find_pretrained("quickstart")
ROWS, BLOCK = 4, 16


def config(path: Path, **changes: object) -> TrainConfig:
    ppo = PPOConfig(
        batch_size=8, minibatch_size=ROWS, max_prompt_seq_len=10, max_answer_seq_len=BLOCK - 10,
        ptx_coef=0.1, ptx_path=str(path),
    )  # fmt: skip
    data = DataConfig(overlong="cut")
    return TrainConfig(step=(3,), data=data, ppo=replace(ppo, **changes))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Thirty lines that make 17 blocks and a rest, so that the last batch of an epoch has one."""
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {n:02d}\n" for n in range(30)) + "x" * 4 + "\n")
    return path


def test_a_batch_has_a_minibatchs_rows_of_whole_blocks(corpus: Path) -> None:
    loader = ptx_loader(config(corpus), ACTOR)
    assert loader is not None
    batch = loader.batch(0)
    assert batch.tokens_BT.shape == (ROWS, BLOCK)
    np.testing.assert_array_equal(batch.lengths_B, BLOCK)
    np.testing.assert_array_equal(batch.valid_B, 1)
    text = "".join(str(ACTOR.tokenizer.decode(row)) for row in batch.tokens_BT)
    assert "line" in text


def test_text_shorter_than_the_run_is_read_again_in_another_order(corpus: Path) -> None:
    loader = ptx_loader(config(corpus), ACTOR)
    assert loader is not None

    def epoch(number: int) -> list[bytes]:
        batches = [loader.batch(number * loader.num_batches + n) for n in range(loader.num_batches)]
        return [
            row.tobytes()
            for batch in batches
            for row, valid in zip(batch.tokens_BT, batch.valid_B, strict=True)
            if valid
        ]

    first, second = epoch(0), epoch(1)
    assert len(first) == loader.num_rows
    assert len(first) % ROWS
    assert sorted(first) == sorted(second)
    assert first != second


def test_an_updates_batch_depends_on_its_number_alone(corpus: Path) -> None:
    """So a resumed run goes on where it was."""
    one, other = (ptx_loader(config(corpus), ACTOR) for _ in range(2))
    assert one is not None
    assert other is not None
    for number in range(9):
        one.batch(number)
    np.testing.assert_array_equal(one.batch(9).tokens_BT, other.batch(9).tokens_BT)


def test_it_is_off_by_default() -> None:
    assert ptx_loader(TrainConfig(), ACTOR) is None


@pytest.mark.parametrize("changes", [{"ptx_path": None}, {"ptx_coef": 0.0}])
def test_a_coefficient_and_a_path_go_together(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="mixed in with both, a coefficient above 0 and a path"):
        config(Path("corpus.txt"), **changes)


def test_text_that_is_missing_or_too_short_is_said_before_anything_compiles(
    tmp_path: Path, corpus: Path
) -> None:
    plain = config(corpus)
    with pytest.raises(FileNotFoundError, match="nowhere.txt: no such file"):
        check_data(replace(plain, ppo=replace(plain.ppo, ptx_path="nowhere.txt")), ACTOR)
    short = tmp_path / "short.txt"
    short.write_text("few\n")
    with pytest.raises(ValueError, match="short.txt: 5 tokens make no block of 16"):
        check_data(replace(plain, ppo=replace(plain.ppo, ptx_path=str(short))), ACTOR)


def test_overwriting_never_deletes_the_text(corpus: Path) -> None:
    with pytest.raises(ValueError, match=f"would delete {corpus}, which this run reads"):
        check_keeps_inputs(config(corpus), corpus.parent)
