"""Where compiled programs stay between runs."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_compiled_programs() -> None:
    """Keeps them under `$XDG_CACHE_HOME` (`~/.cache`), unless another place was chosen."""
    if jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        compilation_cache.set_cache_dir(str(home / "rlhf_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
