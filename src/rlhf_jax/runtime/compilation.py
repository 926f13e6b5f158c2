"""Where compiled programs stay between runs, and whether they repeat to the bit."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
"""The second because jaxlib 0.11.2 has no configuration of its own products without autotuning."""


def keep_compiled_programs() -> None:
    """Keeps them under `$XDG_CACHE_HOME` (`~/.cache`), unless another place was chosen."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        compilation_cache.set_cache_dir(str(home / "rlhf_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def exclude_nondeterministic_operations() -> None:
    """Lets XLA compile for GPUs only what gives the same bits in every run.

    Left out are sums by atomics: XLA's scatter (the gradient of an embedding) has a slower form
    without, and attention is the Pallas kernel in place of cuDNN's: these have no atomics. Products
    are those of cuBLAS, chosen without timing them: what is fastest may be another in the next run.

    Raises:
        ValueError: JAX has started its devices, and XLA read its flags then.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC in flags:
        return
    count = jax.config.jax_num_cpu_devices
    try:  # a setting that JAX refuses to change once its devices have started
        jax.config.update("jax_num_cpu_devices", count + 1)
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ValueError(
            "deterministic: JAX has started its devices already and no longer reads flags: start "
            f"Python with XLA_FLAGS='{DETERMINISTIC}'"
        ) from error
    os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
