"""Options that several commands have: one text and one default for each."""

from collections.abc import Callable
from math import isnan
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


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


DEBUG = click.option("--debug", is_flag=True, help="Show tracebacks.")
DEBUG_ENGINE = click.option(
    "--debug", is_flag=True, help="Show tracebacks and the log of a failed engine."
)
DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What engines run on; auto is what the installed vLLM serves here.",
)
OFFLINE = click.option(
    "--offline",
    is_flag=True,
    help="Take rows and models from the hub's cache on this machine only (HF_HUB_OFFLINE=1).",
)
QUIET = click.option(
    "--quiet", is_flag=True, help="Print nothing but the last line of JSON, and errors on stderr."
)


def dtype_option(help_text: str) -> Callable[[Command], Command]:
    """The option --dtype of a command that starts engines."""
    return click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help=help_text,
    )


def margin_option(default: float | None, what_for: str) -> Callable[[Command], Command]:
    """The option --margin of a command that judges losses of score."""
    return click.option(
        "--margin",
        type=RangeOfNumbers(0, 1, min_open=True),
        metavar="LOSS",
        default=default,
        show_default=default is not None,
        help=f"The loss of score that is acceptable, from 0 to 1: {what_for}",
    )
