"""The command line: flags and YAML to one frozen TrainConfig, and back to YAML."""

from rlhf_jax.cli.config_file import to_yaml
from rlhf_jax.cli.parse import parse

__all__ = ["parse", "to_yaml"]
