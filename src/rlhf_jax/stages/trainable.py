"""A model that is about to train: its weights, its adapters, and which of them move."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshes.layout import Layout
from rlhf_jax.engine.optimizer import (
    Optimizer,
    OptimizerConfig,
    Rates,
    learning_rates,
    make_optimizer,
)
from rlhf_jax.hf.peft import Adapter, read_factors
from rlhf_jax.hf.peft_export import save_adapter
from rlhf_jax.hf.pretrained import Pretrained
from rlhf_jax.models.adapted import Adapted, is_adapted, without_adapters
from rlhf_jax.models.lora import (
    LoRAConfig,
    adapted_specs,
    adapters_in,
    combine,
    int8_paths,
    new_adapters,
    split,
    trains,
)
from rlhf_jax.models.params import is_spec, param_specs, scalar_specs, store_layout
from rlhf_jax.runtime.log import say
from rlhf_jax.stages.frozen import frozen_dtype, frozen_layout
from rlhf_jax.stages.run import Run


@dataclass(frozen=True)
class Trainable:
    """A whole model, `params`, in STORE, and the declarations of it, adapters and int8 included.

    `fresh` adapters change nothing yet.
    """

    params: Any
    specs: Any
    lora: LoRAConfig
    fresh: bool = True

    @property
    def trained(self) -> Any:
        """What trains, None elsewhere: the params of a TrainState."""
        return self.pick(self.params)

    def pick(self, params: Any) -> Any:
        """What trains of a whole model of this kind."""
        return split(params, trains(self.specs, self.lora))[0]

    @property
    def frozen(self) -> Any:
        """The rest, which `models.lora.combine` puts back; None where everything trains."""
        if self.lora.dim == 0:
            return None
        return split(self.params, trains(self.specs, self.lora))[1]

    @property
    def trained_specs(self) -> Any:
        """The declarations of what trains: what an optimizer is made for."""
        return self.pick(self.specs)

    def optimizer(self, cfg: OptimizerConfig, num_steps: int) -> Optimizer:
        """The stage's, with the adapters' own learning rate."""
        rate = self.lora.learning_rate
        return make_optimizer(cfg, self.trained_specs, num_steps, adapter_rate=rate)

    def rates(self, cfg: OptimizerConfig, num_steps: int) -> Rates:
        """The learning rates of `optimizer`."""
        adapted = self.lora.dim > 0
        return learning_rates(cfg, num_steps, self.lora.learning_rate if adapted else None)

    @property
    def drops(self) -> bool:
        """Whether training needs a key for dropout."""
        return self.lora.drops

    @property
    def moves_matrices(self) -> bool:
        """Whether more trains than adapters and a scalar head."""
        return self.lora.dim == 0 or not self.lora.only

    def reference(self) -> Any:
        """The model as it is now, for good: the buffers of what stays frozen, copies of the rest.

        Fresh adapters are left out, so with `lora.only` nothing at all is copied.
        """
        params, moving = self.params, trains(self.specs, self.lora)
        if self.fresh:
            params, moving = without_adapters(params), without_adapters(moving)
        trained, frozen = split(params, moving)
        return combine(copied(trained), frozen)


@jax.jit
def copied(tree: Any) -> Any:
    """The tree in buffers of its own."""
    return jax.tree.map(jnp.copy, tree)


def load_trainable(
    base: Pretrained,
    lora: LoRAConfig,
    layout: Layout,
    dtype: jnp.dtype,
    *,
    scalar: bool = False,
    key: jax.Array,
) -> Trainable:
    """A model with what `lora` asks for; with a scalar head where `scalar`."""
    specs = adapted_specs(
        scalar_specs(base.cfg) if scalar else param_specs(base.cfg), base.cfg, lora
    )
    read = base.scalar_model if scalar else base.params
    if lora.dim == 0:
        return Trainable(read(layout, dtype, key=key), specs, lora)
    if base.adapter is not None and goes_on(base.adapter, base, specs):
        params = adopt(read(layout, dtype, merged=False, in_int8=int8_paths(specs), key=key), specs)
        return described(Trainable(params, specs, lora, fresh=False), base)
    params = read(layout, dtype, in_int8=int8_paths(specs), key=key)
    params = new_adapters(params, specs, layout, dtype, key=jax.random.fold_in(key, 1))
    return described(Trainable(params, specs, lora), base)


def goes_on(adapter: Adapter, base: Pretrained, specs: Any) -> bool:
    """Whether an earlier adapter is the one asked for, so that it trains on; says so if not."""
    wanted = {path: shape_of(node) for path, node in adapters_in(specs)}
    there = {path: shape_of(node) for path, node in read_factors(adapter, base.cfg).items()}
    if wanted == there:
        return True
    say(
        f"{base.name}: its adapter has other modules, ranks or another alpha than were asked for: "
        "it is merged, and a new one trains"
    )
    return False


def shape_of(node: Adapted[Any]) -> tuple[Any, ...]:
    """What two adapters must have in common for one to go on as the other."""
    return node.side_FA.shape, node.core_AD.shape, node.rows, node.ranks, round(node.scale, 9)


def adopt(params: Any, specs: Any) -> Any:
    """The parameters with what is static about the adapters taken from `specs`."""
    return jax.tree.map(
        lambda spec, leaf: (
            replace(leaf, scale=spec.scale, rate=spec.rate) if is_adapted(leaf) else leaf
        ),
        specs,
        params,
        is_leaf=lambda node: is_spec(node) or is_adapted(node),
    )


def export_adapter(
    run: Run,
    name: str,
    base: Pretrained,
    lora: LoRAConfig,
    trained: Any,
    *,
    fresh: bool,
    scalar: bool = False,
) -> None:
    """Leaves what `trained` (None for the rest) in `<name>_adapter/`, as an adapter of `base`, or
    of that one's base where its adapter trained on; nothing without LoRA.
    """
    if lora.dim == 0:
        return
    earlier = None if fresh else base.adapter
    if base.directory is None or (fresh and base.adapter is not None):
        what = "the built-in model" if base.directory is None else "a merged adapter"
        say(f"{name}: no adapter directory, since {what} is no base model that it could name")
        return
    origin = base.name if earlier is None else earlier.base
    local = Path(origin).expanduser()
    save_adapter(
        run.export_dir(f"{name}_adapter"),
        trained,
        base.cfg,
        run.cfg.dtype,
        lora,
        str(local.absolute()) if local.exists() else origin,
        scalar=scalar,
        carried={} if earlier is None else earlier.whole,
        tokenizer=base.tokenizer,
    )


def load_frozen(
    run: Run, base: Pretrained, model: Trainable, *, offload: bool, dtype: str | None,
    scalar: bool = False, key: jax.Array,
) -> Any:  # fmt: skip
    """What training starts from, as a model that stays so: `Trainable.reference`, or read once
    more where it is asked for in host memory or in another dtype. A base in int8 is always shared:
    another copy would be another model.
    """
    wanted = frozen_dtype(run, dtype)
    narrow = bool(int8_paths(model.specs))
    if narrow or (wanted == run.dtype and not (offload and model.moves_matrices)):
        if offload or wanted != run.dtype:
            what = "not offloaded" if offload else f"not in {wanted}"
            say(f"{base.name}: {what}, it is the {'int8 ' * narrow}base of the adapters that train")
        return model.reference()
    read = base.scalar_model if scalar else base.params
    return read(frozen_layout(store_layout(base.cfg, run.mesh), offload), wanted, key=key)


def described(model: Trainable, base: Pretrained) -> Trainable:
    """The model; says how much of it trains."""
    count = sum(leaf.size for leaf in jax.tree.leaves(model.trained))
    total = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    say(
        f"{base.name}: LoRA of rank {model.lora.dim}, {count / 1e6:.2f}M of "
        f"{total / 1e6:.2f}M parameters train"
    )
    return model
