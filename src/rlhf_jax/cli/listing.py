"""Every flag with its type and default: the command line as a file that a test compares.

python -m rlhf_jax.cli.listing > tests/cli/flags.txt
"""

from rlhf_jax.cli.deepspeed_names import NOT_NEEDED, REFUSED, RENAMED
from rlhf_jax.cli.fields import config_fields, flag_of
from rlhf_jax.cli.names import OWN_FLAGS
from rlhf_jax.models.tiny import QUICKSTART
from rlhf_jax.recipes.catalog import make_recipe


def flag_lines() -> list[str]:
    """Sorted lines: a flag with its type and default in `quickstart`, or what it stands for."""
    fields = config_fields(make_recipe(QUICKSTART)).values()
    lines = [f"{flag_of(f.path)}  {f.type_text}  {f.value_text}" for f in fields]
    lines += [f"{flag_of(name)}  ({meaning})" for name, meaning in OWN_FLAGS.items()]
    lines += [
        f"{flag_of(name)}  ({target.rule} to {flag_of(target.path)})"
        for name, target in RENAMED.items()
    ]
    lines += [f"{flag_of(name)}  (not needed)" for name in NOT_NEEDED]
    lines += [f"{flag_of(name)}  (refused)" for name in REFUSED]
    return sorted(lines)


if __name__ == "__main__":
    print("\n".join(flag_lines()))
