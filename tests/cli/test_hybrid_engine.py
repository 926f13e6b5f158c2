"""Every setting of DeepSpeed's hybrid engine has a meaning here, or a note that says why not."""

import pytest

from rlhf_jax.cli.parse import resolve


@pytest.mark.parametrize(
    ("flag", "note"),
    [
        ("--enable-hybrid-engine", "always trains and generates on the same devices"),
        ("--max-out-tokens=512", "has room for --ppo.max-prompt-seq-len and --ppo.max-answer"),
        ("--release-inference-cache", "freed with it"),
        ("--unpin-actor-parameters", "unless --ppo.pin-rollout keeps them"),
        ("--tp-gather-partition-size=8", "XLA schedules the gathers"),
        ("--enable-cuda-graph", "XLA makes CUDA graphs"),
    ],
)
def test_a_note_says_why_it_is_not_needed(flag: str, note: str) -> None:
    config, notes = resolve([flag])
    assert config == resolve([])[0]
    assert [said for said in notes if note in said and flag.partition("=")[0] in said]


def test_the_others_set_a_field() -> None:
    assert resolve(["--inference-tp-size=2"])[0].inference_tp_size == 2
    assert resolve(["--pin-parameters"])[0].ppo.pin_rollout
    assert not resolve(["--pin-parameters=false"])[0].ppo.pin_rollout
