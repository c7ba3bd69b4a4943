"""What commands that measure have in common: `picbench measure`, `picbench reproduce`."""

import os
import re
from pathlib import Path
from typing import Any

import click

from picbench.cli.guard import traced

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)

COMMIT = click.option(
    "--commit", metavar="NAME", show_default="this checkout's", help="Name of the measured code."
)
DEVICE = click.option("--device", default="cuda", show_default=True, help="cuda or cpu.")
EAGER = click.option("--eager", is_flag=True, help="Neither compile nor capture CUDA graphs.")
MODEL = click.option("--model", default="shape:llama-3.1-8b", show_default=True)
ON_GPU = click.option("--output", type=FOLDER, default=Path("results/gpu"), show_default=True)
REPEATS = click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
SEED = click.option("--seed", type=int, default=0, show_default=True, help="For inputs and order.")


def _part(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", value)
    part = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise click.BadParameter(f"{value!r}: not like 1/2")
    return part


PART = click.option(
    "--part",
    callback=_part,
    default="1/1",
    show_default="all",
    metavar="K/N",
    help="Measure the K-th of N shares; N processes, each on a GPU of its own, write the same "
    "output.",
)


class MeasureCommand(click.Command):
    """A measurement, with --debug; its errors name its own flags."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show tracebacks."))

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        with traced(context.params.pop("debug")):
            return super().invoke(context)


class Measurements(click.Group):
    """A group of measurements."""

    command_class = MeasureCommand
    group_class = type


def exact_float32() -> None:
    """Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
