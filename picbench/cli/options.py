"""Options that several commands have, and what a shell offers for --algo, --dataset and --model.

click makes the completion of commands and flags: `_PICBENCH_COMPLETE=bash_source picbench` prints
what bash has to be given, and `zsh_source` and `fish_source` what these do.
"""

import os
from math import isnan
from pathlib import Path
from typing import Any

import click

from picbench.files import check_place


class RangeOfNumbers(click.FloatRange):
    """A range that NaN is not in, although it is neither below nor above anything."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; see `click.ParamType`."""
        found = float(super().convert(value, param, ctx))
        if isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


class Place(click.Path):
    """A file or a folder that can be there: a command's work is not lost when it is written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path; refused where it lies below a file."""
        path = super().convert(value, param, ctx)
        try:
            check_place(Path(os.fsdecode(path)))
        except OSError as error:
            self.fail(f"{value}: {error.strerror}", param, ctx)
        return path


FILE = Place(path_type=Path, dir_okay=False)
FOLDER = Place(path_type=Path, file_okay=False)

DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What engines run on; auto is what the installed vLLM supports here.",
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of weights and KV; auto is the model's own, or float32 on a CPU that has neither "
    "AVX512_BF16 nor AMX.",
)
OFFLINE = click.option(
    "--offline",
    is_flag=True,
    help="Take rows and models from the hub's cache on this machine only (HF_HUB_OFFLINE=1).",
)
QUIET = click.option(
    "--quiet", is_flag=True, help="Print nothing but the last line of JSON, and errors on stderr."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


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
