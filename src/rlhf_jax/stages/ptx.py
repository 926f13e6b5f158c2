"""The pretraining text that PPO mixes in (PTX, of InstructGPT), a batch for every update."""

from collections.abc import Sequence

import numpy as np

from rlhf_jax.data.batches import TextBatch, collate_text
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.text_blocks import load_text_blocks
from rlhf_jax.data.tokenize import SftRow
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.config import TrainConfig


def read_ptx(cfg: TrainConfig, actor: Pretrained) -> tuple[list[np.ndarray], str]:
    """Blocks of prompt and answer length, and a line that says where they come from.

    Raises:
        ValueError, FileNotFoundError: as `load_text_blocks`.
    """
    assert cfg.ppo.ptx_path is not None, "a coefficient needs a path: PPOConfig checks it"
    length = cfg.ppo.max_prompt_seq_len + cfg.ppo.max_answer_seq_len
    blocks, report = load_text_blocks([cfg.ppo.ptx_path], actor.tokenizer, length)
    return blocks, f"ppo: pretraining text from {report}"


def ptx_loader(cfg: TrainConfig, actor: Pretrained) -> Loader[TextBatch] | None:
    """A batch of text for every update, as many rows as its minibatch has; None where it is off.

    Text that is shorter than the run is read again, reshuffled.
    """
    if not cfg.ppo.ptx_coef:
        return None
    blocks, note = read_ptx(cfg, actor)
    say(note)

    def collate(rows: Sequence[np.ndarray], size: int) -> TextBatch:
        return collate_text([SftRow(row, 0) for row in rows], size, length=len(blocks[0]))

    return Loader(blocks, collate, batch_size=cfg.ppo.rows_per_step, seed=cfg.seed)
