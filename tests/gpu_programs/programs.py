"""The programs of a PPO iteration and of a supervised step, made as a run makes them."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from meshes.axes import DATA, GEN, TP
from meshes.layout import Layout, MeshShape
from rlhf_jax.data.batches import PromptBatch, TextBatch
from rlhf_jax.data.packing import PackedBatch
from rlhf_jax.data.placing import sizes
from rlhf_jax.engine.generate import Rollout
from rlhf_jax.engine.hybrid import HybridEngine
from rlhf_jax.engine.optimizer import OptimizerConfig, make_optimizer
from rlhf_jax.engine.ppo_step import Scorers
from rlhf_jax.engine.sampling import SamplingConfig
from rlhf_jax.engine.state import create_state
from rlhf_jax.engine.step import train_step
from rlhf_jax.inference.ppo import make_cast
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.narrow import Narrow
from rlhf_jax.models.opt import SIZES
from rlhf_jax.models.packed_rows import Places
from rlhf_jax.models.params import abstract_params, param_specs, scalar_specs, store_layout
from rlhf_jax.objectives.adaptive import Control
from rlhf_jax.objectives.experience import Experience
from rlhf_jax.stages.config import TrainConfig
from rlhf_jax.stages.memory_plan import Models, Place, Plan, plan_stage
from rlhf_jax.stages.ppo import Programs
from rlhf_jax.stages.ppo_config import PPOConfig
from rlhf_jax.stages.sft import num_predictions, sft_batch_loss
from rlhf_jax.stages.supervised_config import SFTConfig
from tests.models.cases import LLAMA

BFLOAT16 = jnp.dtype("bfloat16")
OPT = replace(SIZES["facebook/opt-1.3b"], num_layers=2)
CRITIC = replace(SIZES["facebook/opt-350m"], num_layers=2)
GQA = replace(
    LLAMA, num_layers=2, width=2048, embed_width=2048, vocab_size=50000, num_heads=32,
    num_kv_heads=8, head_size=64, mlp_width=5632, max_positions=2048, eos_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """A global batch: rows, and tokens of prompts and answers."""

    batch: int = 16
    prompt: int = 64
    answer: int = 192

    @property
    def length(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Iteration:
    """An actor and a critic on a mesh; its programs are traced."""

    mesh: Any
    actor: ModelConfig = OPT
    critic: ModelConfig = CRITIC
    rows: Rows = Rows()
    parts: int = 1
    slots: int | None = None
    weights: Narrow = "same"
    kv_cache: Narrow = "same"

    def context(self) -> Any:
        """The mesh in context; one without devices (`AbstractMesh`) serves for lowering."""
        if isinstance(self.mesh, jax.sharding.AbstractMesh):
            return jax.sharding.use_abstract_mesh(self.mesh)
        return jax.set_mesh(self.mesh)

    def trace(self, name: str) -> jax.stages.Traced:
        """`generate`, `score`, `update`, `supervised`, `packed`, `packed_score` or
        `packed_update`.
        """
        with self.context():
            return getattr(self, name)()

    def lower(self, name: str) -> jax.stages.Lowered:
        """The same, lowered for GPUs."""
        platforms = ("cuda",) if isinstance(self.mesh, jax.sharding.AbstractMesh) else None
        with self.context():
            return self.trace(name).lower(lowering_platforms=platforms)

    @cached_property
    def engine(self) -> HybridEngine:
        return HybridEngine(
            self.actor, self.mesh, (2,),
            slots=self.slots, weights=self.weights, kv_cache=self.kv_cache,
        )  # fmt: skip

    @cached_property
    def plan(self) -> Plan:
        """The bytes that a run would plan for."""
        shape = dict(self.mesh.shape)
        fsdp, inference_tp = shape[DATA] * shape[GEN], shape[GEN] * shape[TP]
        place = Place(MeshShape(1, fsdp, shape[TP]), inference_tp, "gpu")
        models = Models(self.actor, self.critic, self.critic)
        return plan_stage(TrainConfig(dtype="bfloat16", ppo=self.config), "ppo", models, place)

    @cached_property
    def config(self) -> PPOConfig:
        return PPOConfig(
            batch_size=self.rows.batch,
            gradient_accumulation_steps=self.parts,
            max_prompt_seq_len=self.rows.prompt,
            max_answer_seq_len=self.rows.answer,
            remat="full",
            rollout_weights=self.weights,
            rollout_kv_cache=self.kv_cache,
        )

    @cached_property
    def cast(self) -> Any:
        policy: Any = SimpleNamespace(mesh=self.mesh, config=self.actor)
        return make_cast(policy, self.critic, self.config, scored=True)

    @cached_property
    def programs(self) -> Programs:
        plan: Any = SimpleNamespace(reward=None)
        return Programs.create(self.config, self.cast, plan)

    @property
    def policy(self) -> Any:
        """The actor's parameters in STORE."""
        return abstract_params(param_specs(self.actor), self.engine.store, BFLOAT16)

    @property
    def scorer(self) -> Any:
        """Parameters of a critic or reward model in STORE."""
        store = store_layout(self.critic, self.mesh)
        return abstract_params(scalar_specs(self.critic), store, BFLOAT16)

    def prompts(self, layout: Layout) -> PromptBatch:
        tokens, counts = self.array(layout, "P"), self.array(layout)
        return PromptBatch(tokens, counts, counts, self.array(layout, dtype=jnp.float32))

    def rollout(self) -> Rollout:
        layout = self.engine.rollout
        return Rollout(
            self.array(layout, "R"),
            self.array(layout, "R", jnp.float32),
            self.array(layout),
            self.array(layout, dtype=jnp.bool_),
        )

    def array(self, layout: Layout, dims: str = "", dtype: Any = jnp.int32) -> Any:
        """A global batch of rows: one number each, or a prompt (P), answer (R) or both (T)."""
        rows = self.rows
        sizes = {"P": rows.prompt, "R": rows.answer, "T": rows.prompt + rows.answer}
        shape = (rows.batch, *(sizes[dim] for dim in dims))
        axes = ("batch", *(None,) * len(dims))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))

    def whole(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array on every device."""
        everywhere = self.engine.compute.sharding(*(None,) * len(shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def key(self) -> Any:
        return self.whole((), jax.eval_shape(lambda: jax.random.key(0)).dtype)

    def generate(self, **sampling: Any) -> jax.stages.Traced:
        settings = SamplingConfig(max_new_tokens=self.rows.answer, **sampling)
        return self.engine._generate(settings).trace(
            self.policy, self.prompts(self.engine.rollout), key=self.key()
        )

    def score(self, places: Places | None = None) -> jax.stages.Traced:
        """Reference log-probabilities, values and rewards of a rollout."""
        models = Scorers(self.policy, self.policy, self.scorer, self.scorer)
        args = self.prompts(self.engine.compute), self.rollout(), None, Control(None, None)
        return self.programs.score.trace(models, *args, places)

    def packed_score(self) -> jax.stages.Traced:
        """The same where rows share sequences, those of any device."""
        rows = self.array(self.engine.compute)
        return self.score(replace(self.places(1), rows_B=rows, entries_B=rows))

    def places(self, num_parts: int) -> Places:
        """Of rows that fill five eighths of what they might."""
        counts = self.array(self.engine.compute)
        groups = self.engine.compute.batch_size_divisor * num_parts
        num_sequences, lengths = sizes(self.rows.batch // groups, self.rows.length)
        return Places(counts, counts, num_sequences, lengths[4])

    def states(self) -> tuple[Any, Any]:
        """What trains: actor and critic."""
        with self.context():
            return tuple(
                jax.eval_shape(lambda p, o=optimizer: create_state(p, o), params)
                for params, optimizer in zip(
                    (self.policy, self.scorer), self.cast.optimizers, strict=True
                )
            )

    def packed_update(self) -> jax.stages.Traced:
        """One PPO step on rows that share sequences."""
        return self.update(self.places(self.parts))

    def update(self, places: Places | None = None) -> jax.stages.Traced:
        """One PPO step of actor and critic."""
        layout = self.engine.compute
        floats, counts = self.array(layout, "R", jnp.float32), self.array(layout)
        experience = Experience(
            tokens_BT=self.array(layout, "T"),
            prompt_lengths_B=counts,
            response_lengths_B=counts,
            logprobs_BR=floats,
            ref_logprobs_BR=floats,
            values_BR=floats,
            advantages_BR=floats,
            returns_BR=floats,
            mask_BR=self.array(layout, "R", jnp.bool_),
            scores_B=self.array(layout, dtype=jnp.float32),
            valid_B=self.array(layout, dtype=jnp.float32),
        )
        rows = self.whole((self.rows.batch,), jnp.int32)
        stopped = self.whole((), jnp.bool_)
        args = *self.states(), experience, rows, stopped
        return self.programs.update.trace(*args, places=places)

    def supervised(self) -> jax.stages.Traced:
        """One step of supervised fine-tuning of the actor."""
        layout = self.engine.compute
        counts, valid = self.array(layout), self.array(layout, dtype=jnp.float32)
        batch: Any = TextBatch(self.array(layout, "T"), counts, counts, valid)
        return self.sft_step(batch)

    def packed(self) -> jax.stages.Traced:
        """The same of sequences that hold several rows each."""
        layout = self.engine.compute
        tokens, counted = self.array(layout, "T"), self.array(layout, "T", dtype=jnp.float32)
        batch: Any = PackedBatch(tokens, tokens, counted)
        return self.sft_step(batch)

    def sft_step(self, batch: Any) -> jax.stages.Traced:
        settings, layout = SFTConfig(batch_size=self.rows.batch), self.engine.compute
        step = partial(
            train_step,
            loss_fn=partial(sft_batch_loss, cfg=settings, model=self.actor, layout=layout),
            weight_fn=partial(num_predictions, loss_on="all"),
            optimizer=make_optimizer(OptimizerConfig(1e-5), param_specs(self.actor), 100),
            num_parts=self.parts,
        )
        return jax.jit(step, donate_argnums=0).trace(self.states()[0], batch)
