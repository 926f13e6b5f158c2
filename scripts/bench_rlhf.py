"""A whole PPO iteration in DeepSpeed-Chat's benchmark setting: one command, one table.

    python scripts/bench_rlhf.py                            # OPT-1.3B, 350M, batches of 64 and 256
    python scripts/bench_rlhf.py --actor facebook/opt-6.7b --batch 64
    python scripts/bench_rlhf.py --actor facebook/opt-13b --lora-dim 128 --only-lora --batch 64

256 prompt and 256 answer tokens in every row, no row ends early, one PPO epoch, one optimizer step
an iteration, bfloat16 with float32 masters, random weights. It runs the functions of
`stages/ppo.py`. Each phase is waited for; `other` is the rest of the iteration on the wall clock,
its row of metrics.jsonl included. `relayout` is part of generate: what gathering the actor for
decoding takes alone, 0 where decoding reads the update's own buffers.

DeepSpeed-Chat's figures (dschat/utils/perf.py): a forward pass over the whole row for generation,
three (four with rematerialisation) of actor and critic for training; its samples/s leave scoring
out. Model TFLOP/s count what the algorithm needs in all phases: no recomputation, logits of answers
alone. Peak memory is the process's: run one batch size to have its own.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshes.layout import MeshShape, default_inference_tp
from meshes.multihost import start_devices
from meshes.reshard import put_batch
from rlhf_jax.data.batches import collate_prompts
from rlhf_jax.data.byte_tokenizer import byte_tokenizer
from rlhf_jax.data.loader import Loader
from rlhf_jax.data.tokenize import PromptRow
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.ppo_step import answer_logprobs, join_rows, row_scores
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import ScalarModel
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.runtime.profile import deepspeed_flops
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, Plan, device_limit, plan_stage
from rlhf_jax.stages.ppo import Companions, Programs, collect, means, update
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.prompts import PromptData
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.roles import Cast, Roles, load_roles
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.scores import host_scorer

FILL = 0.95
"""The share of device memory that a plan may fill."""
PHASES = ("generate", "score", "update", "other", "step")


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    actor: ModelConfig
    critic: ModelConfig
    ppo: PPOConfig

    @property
    def length(self) -> int:
        return self.ppo.max_prompt_seq_len + self.ppo.max_answer_seq_len


@dataclass
class Bench:
    """An iteration that can be run again and again: the models move on, as in training."""

    run: Run
    cast: Cast
    roles: Roles
    engine: HybridEngine
    programs: Programs
    data: PromptData
    plan: RewardPlan

    @classmethod
    def create(cls, run: Run, setting: Setting) -> "Bench":
        """Loads random models through the functions that load a run's."""
        cfg, tokenizer = setting.ppo, byte_tokenizer()
        actor = Pretrained("actor", setting.actor, tokenizer, None, None)
        reward = Pretrained("reward", setting.critic, tokenizer, None, None)
        plan = RewardPlan((), reward, by_text=False, critic=reward)
        roles, cast = load_roles(run, actor, plan, 1000)
        engine = HybridEngine(setting.actor, run.mesh, (), merge_adapters=cfg.merge_lora)
        return cls(
            run, cast, with_random_heads(roles), engine, Programs.create(cfg, cast, plan),
            random_prompts(setting), plan,
        )  # fmt: skip

    def iterations(self, count: int) -> list[dict[str, float]]:
        """Seconds by phase of `count` iterations; one before them compiles."""
        run, cfg = self.run, self.run.cfg.ppo
        control = Companions.create(cfg, self.roles, self.engine.compute).control
        host = host_scorer(cfg, self.plan, self.cast.reward, byte_tokenizer(), "template")
        rows = []
        for step in range(count + 1):
            experiences, control, metrics = collect(
                run, self.roles, control, self.engine, self.programs, host, self.data, step
            )
            with run.timer.phase("update") as wait:
                self.roles, _, losses = update(
                    run, self.roles, None, self.engine, self.programs, self.data, experiences, step
                )
                wait.append((self.roles.actor, self.roles.critic, losses))
            del experiences
            values = run.metrics.write("ppo", step, metrics | means(losses))
            assert values["val/skipped"] == 0, values
            rows.append({name.split("/")[1]: t for name, t in run.timer.take().items()})
        return rows[1:]

    def relayout_seconds(self) -> float:
        """Of gathering the actor for decoding, alone."""
        params = self.roles.policy
        store, rollout = self.engine.store, self.engine.rollout
        axes = ("vocab", "qkv", "heads", "mlp")
        if all(store.mesh_axes(axis) == rollout.mesh_axes(axis) for axis in axes):
            return 0.0
        return median_seconds(lambda: self.engine.pin(params))

    def score_seconds(self) -> dict[str, float]:
        """The passes of scoring as programs of their own; together they are not the one program."""
        actor, critic = self.cast.actor, self.cast.critic
        prompts = put_batch(self.data.train.batch(0), self.engine.compute)
        num = self.run.cfg.ppo.max_answer_seq_len
        answers = jnp.tile(prompts.tokens_BP, (1, -(-num // prompts.tokens_BP.shape[1])))[:, :num]
        join = jax.jit(partial(join_rows, layout=actor.layout))
        tokens = join(prompts.tokens_BP, prompts.lengths_B, answers)
        logprobs = jax.jit(lambda p, t, n: answer_logprobs(p, t, n, num, actor, 1.0)[0])
        scores = jax.jit(lambda p, t: row_scores(p, t, critic))
        roles, starts = self.roles, prompts.lengths_B
        found = {
            "reference": median_seconds(lambda: logprobs(roles.reference, tokens, starts)),
            "values": median_seconds(lambda: scores(roles.value_model, tokens)),
        }
        if roles.reward is not None:
            reward = roles.reward
            found["reward"] = median_seconds(lambda: scores(reward, tokens))
        return found


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median wall-clock time of a call whose result is waited for; one call before warms up."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def with_random_heads(roles: Roles) -> Roles:
    """Heads of zeros would make every value, score and gradient of the critic 0: products of zeros
    are faster on a GPU.
    """
    assert roles.reward is not None

    def drawn(model: ScalarModel[jax.Array], seed: int) -> ScalarModel[jax.Array]:
        head = model.head_W
        values = jax.random.normal(jax.random.key(seed), head.shape, jnp.float32)
        values = (values * head.shape[0] ** -0.5).astype(head.dtype)
        return replace(model, head_W=jax.device_put(values, head.sharding))

    critic, master = roles.critic, roles.critic.master
    critic = replace(
        critic,
        params=drawn(critic.params, 0),
        master=None if master is None else drawn(master, 0),
    )
    return replace(roles, critic=critic, reward=drawn(roles.reward, 1))


def random_prompts(setting: Setting) -> PromptData:
    """Random prompts of full length: four batches of them."""
    cfg, rng = setting.ppo, np.random.default_rng(0)
    length, count = cfg.max_prompt_seq_len, 4 * cfg.batch_size
    tokens = rng.integers(5, setting.actor.vocab_size, (count, length)).astype(np.int32)
    rows = [PromptRow(row, number, "") for number, row in enumerate(tokens)]
    train = Loader(
        rows, partial(collate_prompts, buckets=(length,)), batch_size=cfg.batch_size, seed=0
    )
    return PromptData(train, [], [], length, dict(enumerate(rows)))


def forward_flops(cfg: ModelConfig, rows: int, length: int, logits: int) -> float:
    """Products with the layers' matrices, causal attention, and `logits` positions of a row."""
    heads = cfg.num_heads * cfg.head_size
    matrices = 3 if cfg.activation == "silu_gated" else 2
    layer = cfg.width * (cfg.qkv_rows + heads + matrices * cfg.mlp_width)
    per_row = cfg.num_layers * (2 * layer * length + 2 * heads * length**2)
    return rows * (per_row + 2 * logits * cfg.vocab_size * cfg.embed_width)


def model_flops(setting: Setting) -> float:
    """Of one iteration: one pass of the actor over every token to sample it, one of each model to
    score, three of actor and critic to train (two where their matrices are frozen).
    """
    cfg, rows, length = setting.ppo, setting.ppo.batch_size, setting.length
    answer = cfg.max_answer_seq_len
    actor = forward_flops(setting.actor, rows, length, answer)
    critic = forward_flops(setting.critic, rows, length, 0)
    passes = 2 + (cfg.old_logprobs == "train") + (2 if cfg.actor_lora.dim else 3)
    return passes * actor + (2 + (2 if cfg.critic_lora.dim else 3)) * critic


def deepspeed_figures(setting: Setting, seconds: dict[str, float]) -> dict[str, float]:
    """TFLOP/s of generation and training, and end-to-end samples/s, as perf.py counts them."""
    cfg, rows, length = setting.ppo, setting.ppo.batch_size, setting.length

    def passes(model: ModelConfig, lora: LoRAConfig) -> float:
        adapted = 1 - 2 * lora.dim / model.width if lora.dim else 0.0
        return (3 if cfg.remat == "none" else 4) - adapted

    generated = deepspeed_flops(setting.actor, rows, length, 1)
    trained = sum(
        deepspeed_flops(model, rows, length, 1) * passes(model, lora)
        for model, lora in (
            (setting.actor, cfg.actor_lora),
            (setting.critic, cfg.critic_lora),
        )
    )
    generate, train = seconds["generate"], seconds["update"]
    return {
        "generation": generated / generate,
        "training": trained / train,
        "total": (generated + trained) / (generate + train),
        "samples": rows / (generate + train),
    }


def peak_bytes() -> tuple[int, int] | None:
    """The largest use of a device since the process began, and what it may use; None on a CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(stats):
        return None
    return (
        max(s["peak_bytes_in_use"] for s in stats if s),
        min(s["bytes_limit"] for s in stats if s),
    )


def print_row(setting: Setting, bench: Bench, rows: Sequence[dict[str, float]]) -> None:
    """One line of the table, medians over iterations."""
    seconds = {name: statistics.median(row[name] for row in rows) for name in PHASES}
    cfg, devices = setting.ppo, bench.run.mesh.size
    theirs, peak = deepspeed_figures(setting, seconds), peak_bytes()
    cells = [str(cfg.batch_size), str(cfg.gradient_accumulation_steps)]
    cells += [f"{seconds[name]:.3f}" for name in PHASES[:3]]
    cells += [f"{bench.relayout_seconds():.4f}", f"{seconds['other']:.3f}"]
    cells += [f"{seconds['step']:.3f}", f"{cfg.batch_size / seconds['step']:.1f}"]
    cells += [f"{model_flops(setting) / seconds['step'] / devices / 1e12:.0f}"]
    cells += [
        f"{theirs[name] / devices / 1e12:.0f}" for name in ("generation", "training", "total")
    ]
    cells += [f"{theirs['samples']:.1f}", "-" if peak is None else f"{peak[0] / 1e9:.1f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


HEADER = (
    "| batch | parts | generate s | score s | update s | relayout s | other s | total s "
    "| samples/s | model TFLOP/s | DSC generation TFLOP/s | DSC training | DSC total "
    "| DSC samples/s | peak GB |\n" + "|---" * 15 + "|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a PPO iteration, phase by phase")
    parser.add_argument("--actor", default="facebook/opt-1.3b")
    parser.add_argument("--critic", default="facebook/opt-350m", help="critic and reward model")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--mesh", help="FxT; without: all devices")
    parser.add_argument("--remat", default="full", choices=["none", "dots", "full"])
    parser.add_argument("--old-logprobs", default="rollout", choices=["rollout", "train"])
    parser.add_argument("--parts", type=int, help="gradient accumulation; without: what fits")
    parser.add_argument("--lora-dim", type=int, default=0, help="adapters of the actor")
    parser.add_argument("--only-lora", action="store_true", help="adapters alone train")
    parser.add_argument("--offload", action="store_true", help="frozen models on the host")
    parser.add_argument("--passes", action="store_true", help="time the passes of scoring too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.prompt, args.answer, args.batch = 16, 16, [8, 16]
        args.actor = args.critic = "the built-in model"
    return args


def setting_of(args: argparse.Namespace, batch: int, parts: int) -> Setting:
    """One line of the table."""
    tiny = quickstart_config(264, 257, 258, 256)
    adapters = LoRAConfig(dim=args.lora_dim, only=args.only_lora)
    ppo = PPOConfig(
        batch_size=batch,
        gradient_accumulation_steps=parts,
        max_prompt_seq_len=args.prompt,
        max_answer_seq_len=args.answer,
        standardize_score=False,
        old_logprobs=args.old_logprobs,
        remat=args.remat,
        actor_lora=adapters,
        offload_reference_model=args.offload,
        offload_reward_model=args.offload,
    )
    actor, critic = (tiny, tiny) if args.tiny else (SIZES[args.actor], SIZES[args.critic])
    return Setting(replace(actor, eos_token_id=None), replace(critic, eos_token_id=None), ppo)


def chosen_setting(args: argparse.Namespace, batch: int, shape: MeshShape) -> tuple[Setting, Plan]:
    """As many parts as were asked for, or the fewest whose plan fits the devices."""
    limit, rows = device_limit(), batch // (shape.replica * shape.fsdp)
    counts = [args.parts] if args.parts else [n for n in range(1, rows + 1) if rows % n == 0]
    plan = None
    for parts in counts:
        setting = setting_of(args, batch, parts)
        models = Models(setting.actor, setting.critic, setting.critic)
        place = Place(shape, None, jax.default_backend())
        plan = plan_stage(TrainConfig(step=(3,), ppo=setting.ppo), "ppo", models, place)
        if args.parts or limit is None or plan.peak <= FILL * limit:
            return setting, plan
    assert plan is not None, "a batch has at least one part"
    raise SystemExit(
        f"a batch of {batch} does not fit in any number of parts:\n{plan.table(limit)}"
    )


def main() -> None:
    args = arguments()
    shape = start_devices(args.mesh)
    plans = []
    print(
        f"{jax.devices()[0].device_kind}, mesh {shape}, actor {args.actor}, critic and reward "
        f"{args.critic}, bf16, {args.prompt} + {args.answer} tokens, remat {args.remat}, old "
        f"log-probabilities of the {args.old_logprobs}, LoRA rank {args.lora_dim}"
    )
    print(HEADER)
    for batch in args.batch:
        setting, plan = chosen_setting(args, batch, shape)
        plans.append((batch, plan))
        with tempfile.TemporaryDirectory() as directory:
            cfg = TrainConfig(step=(3,), output_dir=directory, ppo=setting.ppo)
            heads = setting.actor.num_heads, setting.actor.num_kv_heads
            run = Run(cfg, shape, default_inference_tp(shape, *heads))
            with jax.set_mesh(run.mesh):
                bench = Bench.create(run, setting)
                rows = bench.iterations(args.repeats)
                print_row(setting, bench, rows)
                if args.passes:
                    passes = bench.score_seconds().items()
                    print(", ".join(f"{name} alone {t:.3f} s" for name, t in passes))
            del bench, run
    for batch, plan in plans:
        print(f"batch {batch}: {plan.table(device_limit())}")


if __name__ == "__main__":
    main()
