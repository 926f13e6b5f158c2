"""Golden checkpoints, adapters and numbers for the tests, by transformers and PEFT with PyTorch.

Neither PyTorch nor this script is needed to use or test rlhf-jax: the results are committed.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors peft
    /tmp/torch/bin/python scripts/make_goldens.py --out tests/goldens
    /tmp/torch/bin/python scripts/make_goldens.py --verify EXPORT --against tests/goldens/opt
    /tmp/torch/bin/python scripts/make_goldens.py --verify RUN/actor_adapter --against RUN/actor

The third form loads a directory that rlhf-jax exported as transformers (or DeepSpeed-Chat) loads
it, and compares tensors with the golden checkpoint it came from and outputs with its numbers. The
fourth loads an adapter as PEFT loads it, and compares outputs with those of the merged export.
"""

import argparse
import json
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
)

VOCAB, LENGTH, LENGTHS = 90, 12, (12, 7, 9)
OPT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 68,
    "max_position_embeddings": 24,
}
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 172,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN2_SIZES: dict[str, Any] = LLAMA_SIZES | {"intermediate_size": 68, "tie_word_embeddings": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LANGUAGE_MODELS = {
    "opt": OPTConfig(**OPT_SIZES),
    "opt_post_norm": OPTConfig(**OPT_SIZES, word_embed_proj_dim=16, do_layer_norm_before=False),
    "llama": LlamaConfig(**LLAMA_SIZES),
    "llama3_rope": LlamaConfig(
        **LLAMA_SIZES,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    "mistral": MistralConfig(**LLAMA_SIZES, sliding_window=4),
    "qwen2": Qwen2Config(**QWEN2_SIZES),
}
ONE_SCORE: dict[str, Any] = {"num_labels": 1}
SCORERS = {
    "opt_scorer": OPTConfig(**OPT_SIZES, **ONE_SCORE),
    "opt_post_norm_scorer": OPTConfig(
        **OPT_SIZES, **ONE_SCORE, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "llama_scorer": LlamaConfig(**LLAMA_SIZES, **ONE_SCORE),
}


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt_adapter": (
        "opt",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"},
    ),
    "llama_adapter": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": "all-linear",
            "exclude_modules": ["up_proj"],
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 12},
            "use_rslora": True,
            "task_type": "CAUSAL_LM",
        },
    ),
    "opt_scorer_adapter": (
        "opt",
        {
            "r": 2,
            "lora_alpha": 1,
            "target_modules": ["fc1", "fc2", "out_proj"],
            "modules_to_save": ["score", "self_attn_layer_norm"],
            "bias": "all",
            "task_type": "SEQ_CLS",
        },
    ),
}
"""By name: the golden model that it is trained on, and PEFT's settings."""


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that a wrong row, bias or norm shows in the outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if norm else 0.2 * noise)


def batches(eos: int) -> dict[str, np.ndarray]:
    """The same rows right-padded and left-padded; the second row ends in the stop token."""
    rng = np.random.default_rng(0)
    right = np.zeros((len(LENGTHS), LENGTH), np.int64)
    left = np.zeros_like(right)
    for row, length in enumerate(LENGTHS):
        tokens = rng.integers(3, VOCAB, length)
        if row == 1:
            tokens[-1] = eos
        right[row, :length], left[row, LENGTH - length :] = tokens, tokens
    return {"right": right, "left": left}


def outputs(model: torch.nn.Module, tokens: np.ndarray, side: str) -> dict[str, np.ndarray]:
    """Logits and last hidden states (what the head reads) at every position."""
    position, length = np.arange(LENGTH)[None], np.array(LENGTHS)[:, None]
    mask = position < length if side == "right" else position >= LENGTH - length
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask).long()}
        logits = model(**inputs).logits
        hidden = model.base_model(**inputs).last_hidden_state
    return {f"{side}_logits": logits.numpy(), f"{side}_hidden": hidden.numpy()}


def make_language_model(name: str, config: Any, out: Path, seed: int) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, seed)
    model.save_pretrained(out / name)
    numbers = {"lengths": np.array(LENGTHS)}
    for side, tokens in batches(config.eos_token_id).items():
        numbers |= {f"{side}_tokens": tokens, **outputs(model, tokens, side)}
    np.savez_compressed(out / name / "golden.npz", allow_pickle=False, **numbers)
    if name == "opt":
        make_pickles(model, out)


def make_scorer(name: str, config: Any, out: Path, seed: int) -> None:
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    randomise(model.eval(), seed)
    model.save_pretrained(out / name)
    tokens = batches(config.eos_token_id)["right"]
    mask = np.arange(LENGTH)[None] < np.array(LENGTHS)[:, None]
    padded = np.where(mask, tokens, config.pad_token_id)
    with torch.no_grad():
        scores = model(
            input_ids=torch.tensor(padded), attention_mask=torch.tensor(mask).long()
        ).logits
    np.savez_compressed(
        out / name / "golden.npz",
        lengths=np.array(LENGTHS),
        right_tokens=padded,
        scores=scores[:, 0].numpy(),
    )


def make_pickles(model: torch.nn.Module, out: Path) -> None:
    """The OPT model as `pytorch_model.bin` in float16, and odd pickles for the reader."""
    folder = out / "opt_bin"
    folder.mkdir(parents=True, exist_ok=True)
    model.config.to_json_file(folder / "config.json", use_diff=False)
    torch.save(model.half().state_dict(), folder / "pytorch_model.bin")
    model.float()
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    odd = OrderedDict(
        whole=base,
        transposed=base.T,
        window=base[1:3, 2:5],
        scalar=torch.tensor(2.5),
        parameter=torch.nn.Parameter(torch.arange(3, dtype=torch.bfloat16)),
        integers=torch.arange(4),
    )
    torch.save(odd, out / "odd.bin")
    torch.save(odd, out / "legacy.bin", _use_new_zipfile_serialization=False)


class RewardModel(torch.nn.Module):
    """DeepSpeed-Chat's, as far as its state dict goes (`utils/model/reward_model.py`)."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        width = getattr(base.config, "word_embed_proj_dim", base.config.hidden_size)
        self.v_head = torch.nn.Linear(width, 1, bias=False)
        self.rwtransformer = base

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.rwtransformer(tokens, attention_mask=mask)[0]).squeeze(-1)


def make_adapter(name: str, base: str, settings: dict[str, Any], out: Path, seed: int) -> None:
    """An adapter of a golden model with values everywhere, and what PEFT computes with it."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    scalar = settings["task_type"] == "SEQ_CLS"
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    more: dict[str, Any] = {"num_labels": 1} if scalar else {}
    model = kind.from_pretrained(
        out / base, dtype=torch.float32, attn_implementation="eager", **more
    )
    model = get_peft_model(model, LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(out / name)
    (out / name / "README.md").unlink(missing_ok=True)
    tokens = batches(model.config.eos_token_id)["right"]
    mask = np.arange(LENGTH)[None] < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, tokens, model.config.pad_token_id) if scalar else tokens
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long()
        ).logits.numpy()
    found = {"scores": logits[:, 0]} if scalar else {"right_logits": logits}
    np.savez_compressed(
        out / name / "golden.npz", allow_pickle=False,
        lengths=np.array(LENGTHS), right_tokens=tokens, **found,
    )  # fmt: skip


def verify_adapter(adapter: Path, merged: Path) -> None:
    """Raise where PEFT does not load an adapter, or does not compute what the merged model does."""
    from peft import PeftConfig, PeftModel  # pyright: ignore[reportMissingImports]

    config = PeftConfig.from_pretrained(adapter)
    scalar = config.task_type == "SEQ_CLS"
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    more: dict[str, Any] = {"num_labels": 1} if scalar else {}
    base = kind.from_pretrained(config.base_model_name_or_path, dtype=torch.float32, **more)
    whole = kind.from_pretrained(merged, dtype=torch.float32).eval()
    base.config.pad_token_id = whole.config.pad_token_id
    tokens = torch.tensor(np.random.default_rng(0).integers(3, base.config.vocab_size, (4, 9)))
    with torch.no_grad():
        before = base.eval()(tokens).logits
        found = PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
        expected = whole(tokens).logits
    assert torch.abs(found - before).max() > 1e-4, "the adapter changes nothing"
    largest = torch.abs(expected).max().item()
    difference = torch.abs(found - expected).max().item()
    stored = json.loads((merged / "config.json").read_text())["dtype"]
    allowed = (1e-4 if stored == "float32" else 0.02) * max(largest, 1)
    assert difference < allowed, f"outputs differ by {difference} of {largest}"
    print(f"{adapter}: PEFT's outputs differ from {merged} by {difference:.2g} of {largest:.2g}")


def verify(export: Path, golden: Path) -> None:
    """Raise where an export does not load, or is not the golden model."""
    if (export / "adapter_config.json").exists():
        verify_adapter(export, golden)
        return
    numbers = np.load(golden / "golden.npz")
    config = AutoConfig.from_pretrained(export)
    mask = torch.tensor(np.arange(LENGTH)[None] < numbers["lengths"][:, None])
    if (export / "pytorch_model.bin").exists():
        verify_deepspeed_chat(export, config, golden, numbers, mask)
    elif "scores" in numbers:
        model = load_whole(AutoModelForSequenceClassification, export)
        compare_tensors(model, load_whole(AutoModelForSequenceClassification, golden))
        eos = config.eos_token_id
        assert config.pad_token_id != eos, "the pad id is the stop id"
        tokens = np.where(mask, numbers["right_tokens"], config.pad_token_id)
        scores = model(input_ids=torch.tensor(tokens), attention_mask=mask.long()).logits[:, 0]
        close("scores", scores, numbers["scores"])
    else:
        model = load_whole(AutoModelForCausalLM, export)
        compare_tensors(model, load_whole(AutoModelForCausalLM, golden))
        tokens = torch.tensor(numbers["right_tokens"])
        logits = model(input_ids=tokens, attention_mask=mask.long()).logits
        close("logits", logits[mask], numbers["right_logits"][mask.numpy()])
    print(f"{export}: loads, and equals {golden}")


def verify_deepspeed_chat(
    export: Path, config: Any, golden: Path, numbers: dict, mask: torch.Tensor
) -> None:
    """As `create_critic_model` loads a step-2 directory: the bare model, then one state dict."""
    model = RewardModel(AutoModel.from_config(config)).eval()
    state = torch.load(export / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict(state, strict=True)
    source = load_whole(AutoModelForSequenceClassification, golden)
    compare_tensors(model.rwtransformer, source.base_model)
    assert torch.equal(model.v_head.weight, source.score.weight)
    values = model(torch.tensor(numbers["right_tokens"]), mask.long())
    last = values[torch.arange(len(LENGTHS)), torch.tensor(numbers["lengths"]) - 1]
    close("values", last, numbers["scores"])


def load_whole(kind: Any, directory: Path) -> torch.nn.Module:
    model, info = kind.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    problems = {key: value for key, value in info.items() if value}
    assert not problems, f"{directory}: {problems}"
    return model.eval()


def compare_tensors(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def close(what: str, found: torch.Tensor, expected: np.ndarray) -> None:
    difference = np.abs(found.detach().numpy() - expected).max()
    assert difference < 1e-4, f"{what} differ by {difference}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden checkpoints, and checks of exports.")
    parser.add_argument("--out", type=Path, help="write the golden checkpoints here")
    parser.add_argument("--verify", type=Path, help="check this export")
    parser.add_argument("--against", type=Path, help="the golden checkpoint it came from")
    args = parser.parse_args()
    if args.verify:
        verify(args.verify, args.against)
        return
    for seed, (name, config) in enumerate(LANGUAGE_MODELS.items()):
        make_language_model(name, config, args.out, seed)
    for seed, (name, config) in enumerate(SCORERS.items(), start=100):
        make_scorer(name, config, args.out, seed)
    for seed, (name, (base, settings)) in enumerate(ADAPTERS.items(), start=200):
        make_adapter(name, base, settings, args.out, seed)
    made = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "peft": version("peft"),
    }
    (args.out / "made_with.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
