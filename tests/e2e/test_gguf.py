"""Training starts from a GGUF file, with an adapter too, and leaves Hugging Face's format."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.params import store_layout
from tests.hf.gguf_files import letters_model

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama"


def parameters(name: Path) -> list[np.ndarray]:
    model = find_pretrained(str(name))
    layout = store_layout(model.cfg, make_mesh(parse_mesh("1x1"), 1))
    params = model.params(layout, jnp.dtype("float32"), key=jax.random.key(0))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def test_an_adapter_on_a_gguf_file(run, small, tmp_path: Path, tolerance) -> None:
    file = letters_model(tmp_path / "tiny.gguf", GOLDEN)
    changes = {
        "mesh": "4x2", "step": (1,), "actor_model": str(file), "sft.max_steps": 2,
        "sft.lora.dim": 2, "sft.lora.only": True, "sft.lora.learning_rate": 0.01,
    }  # fmt: skip
    made = run(small(tmp_path / "run", changes))
    adapter = find_pretrained(str(made.directory / "sft_adapter"))
    assert adapter.directory == file
    base, merged, trained = (
        parameters(each) for each in (file, made.directory / "sft", made.directory / "sft_adapter")
    )
    assert max(np.abs(a - b).max() for a, b in zip(base, merged, strict=True)) > 1e-3
    for ours, theirs in zip(trained, merged, strict=True):
        np.testing.assert_allclose(ours, theirs, **tolerance(np.float32))
