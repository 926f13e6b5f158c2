"""A whole PPO iteration in DeepSpeed-Chat's benchmark setting: one command, one table.

    python scripts/bench_rlhf.py                            # OPT-1.3B, 350M, batches of 64 and 256
    python scripts/bench_rlhf.py --actor facebook/opt-6.7b --batch 64
    python scripts/bench_rlhf.py --actor facebook/opt-13b --lora-dim 128 --only-lora --batch 64
    python scripts/bench_rlhf.py --batch 64 --varied --packing  # lengths as data have them

256 prompt and 256 answer tokens in every row, no row ends early, one PPO epoch, one optimizer step
an iteration, bfloat16 with float32 masters, random weights. It runs the functions of
`stages/ppo.py`. Each phase is waited for; `other` is the rest of the iteration on the wall clock,
its row of metrics.jsonl included. `relayout` is part of generate: what gathering the actor for
decoding takes alone, 0 where decoding reads the update's own buffers. `--passes` also times the
parts of scoring and the gradients of the update, each as a program of its own; the rest of an
update are the optimizers. With `--varied` prompts are uniform from a quarter of the longest on and
answers log-normal (median 80 of 256); FLOP/s still count full rows.

`--remat=auto` takes the least rematerialisation whose plan fits in some number of parts of at least
16 rows a device: adding up the gradients of more parts takes less time than computing layers anew.
Most of a run is compilation; the error output says how far it is, a second run finds it cached.

DeepSpeed-Chat's figures (dschat/utils/perf.py): a forward pass over the whole row for generation,
three (four where layers are computed anew) of actor and critic for training; its samples/s leave
scoring out. Model TFLOP/s count what the algorithm needs in all phases: no recomputation, logits of
answers alone. Peak memory is the process's: run one batch size to have its own. Below the table
stands what the memory plan says. Set XLA_CLIENT_MEM_FRACTION=0.95 for models that fill a device.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp

from meshes.layout import MeshShape
from meshes.multihost import start_devices
from meshes.reshard import put_batch
from rlhf_jax.data.byte_tokenizer import byte_tokenizer
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.optimizer import MomentsDtype, Optim
from rlhf_jax.engine.ppo_step import actor_loss, critic_loss, num_actions
from rlhf_jax.engine.row_passes import answer_logprobs, join_rows, row_scores
from rlhf_jax.engine.step import gradients
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.lora import LoRAConfig
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.params import ScalarModel
from rlhf_jax.models.remat import Remat
from rlhf_jax.models.tiny import quickstart_config
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.runtime.compilation import keep_compiled_programs
from rlhf_jax.runtime.profile import peak_memory
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.fit_remat import FASTEST_FIRST
from rlhf_jax.stages.inference_tp import choose_inference_tp
from rlhf_jax.stages.memory_plan import Models, Place, Plan, device_limit, plan_stage
from rlhf_jax.stages.ppo import Companions, Programs, collect, means, update, update_settings
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.prompts import PromptData
from rlhf_jax.stages.reward_plan import RewardPlan
from rlhf_jax.stages.roles import Cast, Roles, load_roles
from rlhf_jax.stages.run import Run
from rlhf_jax.stages.scores import HostScorer, host_scorer
from scripts.compile_ahead import compile_ahead
from scripts.iteration_flops import Setting, deepspeed_figures, model_flops
from scripts.random_rows import random_prompts

FILL = 0.95
"""The share of device memory that a plan may fill."""
PHASES = ("generate", "score", "update", "other", "step")
ENOUGH_ROWS = 16
"""Rows of a part on a device from which matrix products run at full speed (x 512 tokens)."""


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
    experience: Any = None

    @classmethod
    def create(cls, run: Run, setting: Setting, *, varied: bool = False) -> "Bench":
        """Loads random models through the functions that load a run's."""
        cfg, tokenizer = setting.ppo, byte_tokenizer()
        actor = Pretrained("actor", setting.actor, tokenizer, None, None)
        reward = Pretrained("reward", setting.critic, tokenizer, None, None)
        plan = RewardPlan((), reward, by_text=False, critic=reward)
        roles, cast = load_roles(run, actor, plan, 1000)
        engine = HybridEngine(
            setting.actor, run.mesh, (), merge_adapters=cfg.merge_lora, slots=cfg.rollout_slots
        )
        return cls(
            run, cast, with_random_heads(roles), engine, Programs.create(cfg, cast, plan),
            random_prompts(setting, varied=varied), plan,
        )  # fmt: skip

    def companions(self) -> tuple[Control, HostScorer]:
        """What an iteration has beside its models: coefficients, and what scores on the host."""
        cfg = self.run.cfg.ppo
        control = Companions.create(cfg, self.roles, self.engine.compute).control
        return control, host_scorer(cfg, self.plan, self.cast.reward, byte_tokenizer(), "template")

    def iterations(self, count: int, *, ahead: bool = False) -> list[dict[str, float]]:
        """Seconds by phase of `count` iterations; one before them compiles, or all at once."""
        run, (control, host) = self.run, self.companions()
        if ahead:
            compile_ahead(self, control, host)
        rows: list[dict[str, float]] = []
        for step in range(count + 1):
            began = time.perf_counter()
            batches, control, metrics = collect(
                run, self.roles, control, self.engine, self.programs, host, self.data, step
            )
            progress(f"iteration {step}: generate and score", began)
            with run.timer.phase("update") as wait:
                self.roles, _, losses = update(
                    run, self.roles, None, self.engine, self.programs, self.data, batches, step
                )
                wait.append((self.roles.actor, self.roles.critic, losses))
            progress(f"iteration {step}: all", began)
            self.experience = batches[0].experience
            del batches
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

    def pass_seconds(self) -> dict[str, float]:
        """The passes of scoring and of the update as programs of their own, which together are not
        quite the two programs.
        """
        return self.score_seconds() | self.gradient_seconds()

    def gradient_seconds(self) -> dict[str, float]:
        """Of the actor's and of the critic's loss."""
        roles, settings = self.roles, update_settings(self.run.cfg.ppo)
        losses = (
            ("actor gradient", actor_loss, roles.actor, self.cast.actor, roles.frozen[0]),
            ("critic gradient", critic_loss, roles.critic, self.cast.critic, roles.frozen[1]),
        )
        found = {}
        for name, loss, state, place, frozen in losses:

            def gradient(params, frozen, batch, loss=loss, place=place):
                def of_batch(params, batch):
                    return loss(params, batch, place, settings)

                parts = settings.num_parts
                return gradients(of_batch, params, batch, num_actions, parts, frozen=frozen)[:2]

            args = state.params, frozen, self.experience
            found[name] = median_seconds(partial(jax.jit(gradient), *args))
        return found

    def score_seconds(self) -> dict[str, float]:
        """Of scoring."""
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


def progress(what: str, began: float) -> None:
    """What was done, and how long it took."""
    print(f"{what} {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


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


def print_row(setting: Setting, bench: Bench, rows: Sequence[dict[str, float]], plan: Plan) -> None:
    """One line of the table, medians over iterations."""
    seconds = {name: statistics.median(row[name] for row in rows) for name in PHASES}
    cfg, devices = setting.ppo, bench.run.mesh.size
    theirs, peak = deepspeed_figures(setting, seconds), peak_memory().get("perf/peak_memory_gib")
    cells = [str(cfg.batch_size), str(cfg.gradient_accumulation_steps), cfg.remat]
    cells += [f"{seconds[name]:.3f}" for name in PHASES[:3]]
    cells += [f"{bench.relayout_seconds():.4f}", f"{seconds['other']:.3f}"]
    cells += [f"{seconds['step']:.3f}", f"{cfg.batch_size / seconds['step']:.1f}"]
    cells += [f"{model_flops(setting) / seconds['step'] / devices / 1e12:.0f}"]
    cells += [
        f"{theirs[name] / devices / 1e12:.0f}" for name in ("generation", "training", "total")
    ]
    cells += [f"{theirs['samples']:.1f}", f"{peak * 2**30 / 1e9:.1f}" if peak else "-"]
    cells += [f"{plan.peak / 1e9:.1f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


HEADER = (
    "| batch | parts | remat | generate s | score s | update s | relayout s | other s | total s "
    "| samples/s | model TFLOP/s | DSC generation TFLOP/s | DSC training | DSC total "
    "| DSC samples/s | peak GB | planned GB |\n" + "|---" * 17 + "|"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a PPO iteration, phase by phase")
    parser.add_argument("--actor", default="facebook/opt-1.3b")
    parser.add_argument("--critic", default="facebook/opt-350m", help="critic and reward model")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--mesh", help="FxT; without: all devices")
    parser.add_argument("--inference-tp-size", type=int, help="devices that share a row")
    parser.add_argument("--remat", default="auto", choices=get_args(Remat))
    parser.add_argument("--old-logprobs", default="rollout", choices=["rollout", "train"])
    parser.add_argument("--parts", type=int, help="gradient accumulation; without: what fits")
    parser.add_argument("--lora-dim", type=int, default=0, help="adapters of the actor")
    parser.add_argument("--only-lora", action="store_true", help="adapters alone train")
    parser.add_argument("--int8", action="store_true", help="the base of the adapters in int8")
    parser.add_argument("--offload", action="store_true", help="frozen models on the host")
    parser.add_argument("--offload-optimizers", action="store_true", help="masters, moments too")
    parser.add_argument("--optim", default="adamw", choices=get_args(Optim))
    parser.add_argument("--moments-dtype", default="float32", choices=get_args(MomentsDtype))
    parser.add_argument("--slots", type=int, help="rows that decode at once; without: all")
    parser.add_argument("--varied", action="store_true", help="prompts and answers of many lengths")
    parser.add_argument("--packing", action="store_true", help="score and update on sequences")
    parser.add_argument("--passes", action="store_true", help="score and update in parts too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile-ahead", action="store_true", help="all programs at once")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    args = parser.parse_args()
    if args.compile_ahead and (args.packing or args.offload_optimizers):
        parser.error(
            "--compile-ahead knows one update program: with --packing the sizes of sequences are "
            "known after a rollout, with --offload-optimizers there are several: leave it out"
        )
    if args.tiny:
        args.prompt, args.answer, args.batch = 16, 16, [8, 16]
        args.actor = args.critic = "the built-in model"
    return args


def setting_of(args: argparse.Namespace, batch: int, parts: int, remat: Remat) -> Setting:
    """One line of the table."""
    tiny = quickstart_config(264, 257, 258, 256)
    adapters = LoRAConfig(dim=args.lora_dim, only=args.only_lora, load_in_8bit=args.int8)
    ppo = PPOConfig(
        batch_size=batch,
        gradient_accumulation_steps=parts,
        max_prompt_seq_len=args.prompt,
        max_answer_seq_len=args.answer,
        standardize_score=False,
        old_logprobs=args.old_logprobs,
        remat=remat,
        actor_lora=adapters,
        rollout_slots=args.slots,
        packing=args.packing,
        offload=args.offload_optimizers,
        optim=args.optim,
        moments_dtype=args.moments_dtype,
        offload_reference_model=args.offload,
        offload_reward_model=args.offload,
    )
    actor, critic = (tiny, tiny) if args.tiny else (SIZES[args.actor], SIZES[args.critic])
    return Setting(replace(actor, eos_token_id=None), replace(critic, eos_token_id=None), ppo)


def chosen_setting(
    args: argparse.Namespace, batch: int, shape: MeshShape
) -> tuple[Setting, Place, Plan]:
    """What was asked for, or the first that fits the devices."""
    limit, plan = device_limit(), None
    most = None if limit is None else int(FILL * limit)
    for remat, parts in choices(args, batch // (shape.replica * shape.fsdp), limit):
        setting = setting_of(args, batch, parts, remat)
        models = Models(setting.actor, setting.critic, setting.critic)
        cfg = TrainConfig(step=(3,), inference_tp_size=args.inference_tp_size, ppo=setting.ppo)
        platform = jax.default_backend()
        place = Place(shape, choose_inference_tp(cfg, models, shape, platform, most), platform)
        plan = plan_stage(cfg, "ppo", models, place)
        asked = args.parts and args.remat != "auto"
        if asked or most is None or plan.peak <= most:
            return setting, place, plan
    assert plan is not None, "a batch has at least one part"
    raise SystemExit(
        f"a batch of {batch} does not fit in any number of parts:\n{plan.table(limit)}"
    )


def choices(args: argparse.Namespace, rows: int, limit: int | None) -> Iterator[tuple[Remat, int]]:
    """Rematerialisation and parts of so many rows a device, the fastest first."""
    counts = [args.parts] if args.parts else [n for n in range(1, rows + 1) if rows % n == 0]
    if args.remat != "auto":
        yield from ((args.remat, parts) for parts in counts)
        return
    large = [parts for parts in counts if rows // parts >= min(ENOUGH_ROWS, rows)] or counts[:1]
    for remat in FASTEST_FIRST if limit is not None else ():
        for parts in large:
            yield remat, parts
    for parts in counts:
        yield "full", parts


def main() -> None:
    args = arguments()
    keep_compiled_programs()
    shape = start_devices(args.mesh)
    plans = []
    print(
        f"{jax.devices()[0].device_kind}, mesh {shape}, actor {args.actor}, critic and reward "
        f"{args.critic}, bf16, {args.prompt} + {args.answer} tokens, remat {args.remat}, old "
        f"log-probabilities of the {args.old_logprobs}, LoRA rank {args.lora_dim}"
    )
    print(HEADER)
    for batch in args.batch:
        setting, place, plan = chosen_setting(args, batch, shape)
        plans.append((f"batch {batch}, decoding {place.inference_tp}-way", plan))
        with tempfile.TemporaryDirectory() as directory:
            cfg = TrainConfig(step=(3,), output_dir=directory, ppo=setting.ppo)
            assert place.inference_tp is not None
            run = Run(cfg, shape, place.inference_tp)
            with jax.set_mesh(run.mesh):
                began = time.perf_counter()
                bench = Bench.create(run, setting, varied=args.varied)
                progress("models", began)
                rows = bench.iterations(args.repeats, ahead=args.compile_ahead)
                print_row(setting, bench, rows, plan)
                if args.passes:
                    passes = bench.pass_seconds().items()
                    print(", ".join(f"{name} alone {t:.3f} s" for name, t in passes))
            del bench, run
    for what, plan in plans:
        print(f"{what}: {plan.table(device_limit())}")


if __name__ == "__main__":
    main()
