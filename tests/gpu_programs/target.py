"""H200s that are not attached: meshes of them, and programs compiled for them.

Needs JAX's CUDA plugin (`uv sync --group gpu-programs`), no GPU and no driver. GEMMs are not
autotuned, so their tiles differ from those on a GPU; the rest is what a GPU would run.

`h200_target_config.txtpb` is what XLA knows of the GPU; `scripts/dump_gpu_target.py` writes it on
one.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from meshes.layout import make_mesh, parse_mesh
from tests.gpu_programs.hlo import Module, parse
from tests.gpu_programs.thunks import Thunk, parse_thunks
from tests.meshes.compiled import fresh_compiler, optimizing_compiler

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
TARGET = Path(__file__).parents[1] / "kernels" / "h200_target_config.txtpb"
WHY_NOT = (
    None
    if any(importlib.util.find_spec(name) for name in PLUGINS)
    else "JAX's CUDA plugin is not installed: uv sync --group gpu-programs"
)


def mesh_of_h200s(mesh: str, inference_tp: int) -> jax.sharding.Mesh:
    """The mesh of a run on one host."""
    shape = parse_mesh(mesh)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x1x{shape.num_devices}",
    )
    return make_mesh(shape, inference_tp, topology.devices)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. `aliased` are those of results that are written into arguments."""

    arguments: int
    results: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporary


@dataclass(frozen=True)
class Program:
    """What the compiler made of a program: its text, what the runtime launches, its memory."""

    text: str
    launches: str
    memory: Memory

    @cached_property
    def module(self) -> Module:
        return parse(self.text)

    @cached_property
    def thunks(self) -> Thunk:
        return parse_thunks(self.launches)


def compile_for_gpu(lowered: jax.stages.Lowered) -> Program:
    """Compiled, or read from an earlier compilation of the same program.

    JAX's own cache would keep no list of launches. Programs lie beside it.
    """
    kept = _cache_directory() / f"{_fingerprint(lowered)}.json.gz"
    if kept.exists():
        fields = json.loads(gzip.decompress(kept.read_bytes()))
        return Program(fields["text"], fields["launches"], Memory(**fields["memory"]))
    program = _compile(lowered)
    kept.parent.mkdir(parents=True, exist_ok=True)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_bytes(gzip.compress(json.dumps(asdict(program)).encode()))
    written.replace(kept)
    return program


def _compile(lowered: jax.stages.Lowered) -> Program:
    with optimizing_compiler(), fresh_compiler(), tempfile.TemporaryDirectory() as dump:
        options: Any = {"xla_dump_to": dump}
        compiled = lowered.compile(options)
        # The second file is there where a pass changed the sequence: where there are graphs.
        launches = max(Path(dump).glob("*thunk_sequence*.txt"), key=lambda path: len(path.name))
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        return Program(
            text,
            launches.read_text(),
            Memory(
                memory.argument_size_in_bytes,
                memory.output_size_in_bytes,
                memory.alias_size_in_bytes,
                memory.temp_size_in_bytes,
            ),
        )


def _fingerprint(lowered: jax.stages.Lowered) -> str:
    installed = [f"{d.name}=={d.version}" for d in importlib.metadata.distributions()]
    compilers = sorted(name for name in installed if name.startswith(("jax", "nvidia")))
    options = lowered._lowering._compiler_options_kvs  # pyright: ignore
    parts = [lowered.as_text(), repr(options), TARGET.read_text(), *compilers]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cache_directory() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "rlhf_jax" / "gpu-programs"
