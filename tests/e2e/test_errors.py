"""Mistakes are told in words before anything is compiled or written."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshes.layout import make_mesh, parse_mesh
from rlhf_jax.hf.export import save_hf
from rlhf_jax.hf.pretrained import find_pretrained
from rlhf_jax.models.params import store_layout
from rlhf_jax.stages import pipeline
from rlhf_jax.train import main

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}

type Fails = Callable[..., str]


@pytest.fixture
def fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Fails:
    """`fails("--mesh=4x4")`: the message; neither a run nor its directory was started."""

    def started(*args: object) -> None:
        pytest.fail("a run was started")

    monkeypatch.setattr(pipeline, "Run", started)
    monkeypatch.delenv("RLHF_JAX_TRACEBACK", raising=False)

    def run(*flags: str, code: int = 1) -> str:
        capsys.readouterr()
        out = tmp_path / "run"
        existed = out.exists()
        assert main([f"--output-dir={out}", *flags]) == code
        assert out.exists() == existed
        return capsys.readouterr().err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Callable[[str], str]:
    """`data(text)`: the flag that trains on a JSON-lines file with this text."""

    def write(text: str) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(text, encoding="utf-8")
        return f"--data.data-path={path}"

    return write


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny = find_pretrained("quickstart")
    layout = store_layout(tiny.cfg, make_mesh(parse_mesh("1x1"), 1))
    params = tiny.params(layout, jnp.dtype("float32"), key=jax.random.key(0))
    save_hf(directory, params, tiny.cfg, "float32", tiny.tokenizer)
    return directory


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """A copy of `exported`, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


def lines(*rows: Mapping[str, str]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--mesh=4x4"], 1, "--mesh=4x4 asks for 16 devices, 8 are visible: use --mesh=8x1 or"),
        (["--mesh=8"], 1, "--mesh=8 is not a mesh: use FxT"),
        (["--mesh=3x1"], 1, "shards a batch over 3 devices, --sft.batch-size gives parts of 64"),
        (
            ["--mesh=8x1", "--ppo.minibatch-size=4"],
            1,
            "--ppo.minibatch-size gives parts of 4 rows (after gradient accumulation): "
            "use a multiple of 8",
        ),
        (["--mesh=8x1", "--inference-tp-size=3"], 1, "does not fit --mesh=8x1: use one of 1, 2, 4"),
        (["--recipe=quikstart"], 2, "unknown recipe 'quikstart': did you mean quickstart?"),
        (["--ppo.kl-coeff=0.1"], 2, "unknown flag --ppo.kl-coeff: did you mean --ppo.kl-coef?"),
        (["--actor-model=facebook/opt-1.3"], 1, "there is no model 'facebook/opt-1.3'"),
        (["--actor-model=facebook/opt-1.3"], 1, "Did you mean facebook/opt-1.3b?"),
        (
            ["--ppo.max-prompt-seq-len=60"],
            1,
            "--ppo.max-prompt-seq-len=60 and --ppo.max-answer-seq-len=12 make 72 tokens, "
            "quickstart has 64 positions: lower them to 64 together",
        ),
        (["--data.data-path=no/such.jsonl"], 1, "no/such.jsonl: no such file or folder"),
        (["--sft.max-seq-len=65"], 1, "--sft.max-seq-len=65"),
        (["--ppo.max-prompt-seq-len=5"], 1, "--ppo.max-prompt-seq-len"),
        (["--step", "3"], 1, "give --actor-model=RUN/sft --reward-model=RUN/reward of an earlier"),
        (["--resume"], 1, "run holds no run (no config.yaml)"),
        (["--sft.lora.dim=2", "--sft.lora.modules", "query"], 1, "'query' is part of no"),
    ],
)  # fmt: skip
def test_flags(fails: Fails, flags: list[str], code: int, message: str) -> None:
    assert message in fails(*flags, code=code)


def test_step_3_alone_names_the_models_that_are_there(fails: Fails, tmp_path) -> None:
    (tmp_path / "run" / "reward").mkdir(parents=True)
    message = fails("--step", "3")
    models = f"--actor-model={tmp_path / 'run'}/sft --reward-model={tmp_path / 'run'}/reward"
    assert f"give {models} and another --output-dir" in message


def test_a_directory_that_holds_something_is_never_overwritten(fails: Fails, tmp_path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for flags in ((), ("--overwrite-output-dir",)):
        assert "holds files of something else: use another --output-dir" in fails(*flags)
    (out / "config.yaml").write_text("seed: 1234\n")
    assert "holds another run: use --resume to go on with it, --overwrite-output-dir" in fails()
    assert (out / "thesis.txt").read_text() == "years of work"


def test_an_output_directory_that_is_a_file_is_told(fails: Fails, tmp_path) -> None:
    (tmp_path / "run").write_text("years of work")
    assert f"error: --output-dir={tmp_path / 'run'}: is a file; name a directory\n" in fails()
    assert (tmp_path / "run").read_text() == "years of work"


def test_a_run_is_no_model_and_says_what_is_inside(fails: Fails, model: Path) -> None:
    run = model.parent / "earlier"
    for name in ("actor", "sft"):
        shutil.copytree(model, run / name)
    (run / "samples").mkdir()
    wanted = f"{run} has no config.json and no GGUF file: it is no model. It holds models: use "
    assert f"{wanted}{run}/actor or {run}/sft\n" in fails(f"--actor-model={run}")
    file = f"there is no model '{run}/a.md': a file that is no GGUF file ({run}/a.md), and"
    (run / "a.md").write_text("text")
    assert file in fails(f"--actor-model={run}/a.md")


def test_a_resumed_run_names_the_settings_that_differ(fails: Fails, tmp_path) -> None:
    (tmp_path / "run" / "checkpoints" / "ppo" / "5").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\nppo:\n  kl_coef: 0.2\nmesh: 4x2\n")
    message = fails("--resume")
    assert "--seed: 1 then, 1234 now" in message
    assert "--ppo.kl-coef: 0.2 then, 0.1 now" in message
    assert "--mesh" not in message


def test_a_missing_column_is_named(fails: Fails, data) -> None:
    message = fails(data(lines({"question": "a", "answer": "b"})))
    assert "rows.jsonl: a column is missing. The columns there are: answer, question" in message
    assert "stage sft takes" in message


def test_rows_that_a_later_stage_cannot_use_are_told_at_the_start(fails: Fails, data) -> None:
    message = fails(data(lines({"prompt": "a", "completion": "b"})))
    assert "which stage reward cannot use" in message


def test_a_malformed_line_is_named_by_file_and_number(fails: Fails, data) -> None:
    message = fails(data(lines(PAIR, PAIR) + '{"prompt": \n'))
    assert "rows.jsonl, line 3: malformed JSON" in message


def test_data_that_give_a_stage_nothing_are_told_at_the_start(fails: Fails, data) -> None:
    assert "rows.jsonl: the train data set is empty (it holds no rows)" in fails(data(""))
    same = {**PAIR, "rejected": PAIR["chosen"]}
    message = fails(data(lines(same)), "--data.data-split=", "--data.eval-fraction=0")
    assert "reward: of 1 train rows none is left after tokenising" in message
    assert "1 dropped (answers equal)" in message


def test_a_tokenizer_larger_than_the_vocabulary_is_told_at_the_start(
    fails: Fails, model: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    message = fails("--recipe=quickstart", f"--actor-model={model}")
    assert f"{model}: the tokenizer has 259 tokens, the model 200 embedding rows" in message


def test_tensors_that_do_not_fit_the_config_are_all_named(fails: Fails, model: Path) -> None:
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    lost, bent, *_ = sorted(name for name in tensors if tensors[name].ndim == 2)
    tensors["model.extra.weight"] = tensors.pop(lost)
    tensors[bent] = np.ascontiguousarray(tensors[bent][:-1])
    save_file(tensors, weights)
    message = fails("--recipe=quickstart", f"--actor-model={model}")
    assert f"{weights} does not fit its config.json" in message
    for fault in (f"missing: {lost}", "not expected: model.extra.weight", f"misshapen: {bent}"):
        assert fault in message


@pytest.mark.parametrize("flag", ["--actor-model", "--reward-model"])
def test_a_truncated_file_is_named_whichever_stage_would_read_it(
    fails: Fails, model: Path, flag: str
) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = fails("--recipe=quickstart", "--reward.train-from=reward_model", f"{flag}={model}")
    assert f"{weights.name} is truncated" in message


def test_actor_and_reward_model_must_read_the_same_tokens(fails: Fails, model: Path) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    message = fails("--recipe=quickstart", "--step", "3", f"--reward-model={model}")
    assert f"the actor (quickstart) and the reward model ({model}) have different" in message
    assert "('a', " in message


def test_a_foreign_reward_model_has_no_statistics(fails: Fails, model: Path) -> None:
    message = fails("--recipe=quickstart", "--step", "3", f"--reward-model={model}")
    assert f"the reward model {model} has no score_statistics.json" in message
    assert "--ppo.no-standardize-score" in message
