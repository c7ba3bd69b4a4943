"""What the shell offers after --algo, --dataset and --model.

click makes the completion of commands and flags: `_PICBENCH_COMPLETE=bash_source picbench` prints
what bash has to be given, and `zsh_source` and `fish_source` what these do.
"""

import click


def complete_algorithms(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of algorithms, for the last of several arms with commas between them."""
    from picbench.engines import algorithms as known

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in known.names() if name.startswith(last)]


def complete_datasets(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of data sets."""
    from picbench.workloads import datasets as known

    return [name for name in known.describe() if name.startswith(incomplete)]


def complete_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Built-in models; folders and ids on the hub are not offered."""
    from picbench.workloads import models as known

    return [name for name in known.describe() if name.startswith(incomplete)]
