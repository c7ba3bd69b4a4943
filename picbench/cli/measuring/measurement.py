"""What commands that measure have in common: `picbench measure`, `picbench reproduce`."""

import os
import re
from pathlib import Path
from typing import Any

import click

from picbench.cli.options import FOLDER, RangeOfNumbers

#: The model that is served on a GPU where none is named.
LLAMA = "shape:llama-3.1-8b"

CAVEAT = click.option(
    "--caveat", default="", metavar="TEXT", help="What readers must know of the figures."
)
COMMIT = click.option(
    "--commit", metavar="NAME", show_default="this checkout's", help="Name of the measured code."
)
DEVICE = click.option("--device", default="cuda", show_default=True, help="cuda or cpu.")
EAGER = click.option("--eager", is_flag=True, help="Neither compile nor capture CUDA graphs.")
MODEL = click.option("--model", default=LLAMA, show_default=True)
#: The model and the type that `served_by` chooses by the device.
OWN_MODEL = click.option(
    "--model", show_default=f"{LLAMA}, the testbed on a CPU", help="Who serves it."
)
OWN_DTYPE = click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16")),
    show_default="bfloat16, float32 on a CPU",
    help="Type of weights and KV.",
)
ON_CPU = click.option("--output", type=FOLDER, default=Path("results/cpu"), show_default=True)
ON_GPU = click.option("--output", type=FOLDER, default=Path("results/gpu"), show_default=True)
REPEATS = click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
SECONDS = click.option(
    "--seconds",
    type=RangeOfNumbers(0),
    default=0.0,
    metavar="S",
    show_default="no limit",
    help="Begin nothing that would not end within this time; the same command goes on.",
)
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


def served_by(
    device: str, model: str | None, dtype: str | None = None, *, on_cpu: str = "testbed"
) -> dict[str, Any]:
    """A device, and the model and the type that were given or are the device's own."""
    cpu = device == "cpu"
    return {
        "device": device,
        "model": model or (on_cpu if cpu else LLAMA),
        "dtype": dtype or ("float32" if cpu else "bfloat16"),
    }


def exact_float32() -> None:
    """Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
