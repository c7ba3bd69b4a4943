"""`picbench measure`: a command for each measurement of `picbench.experiments.measurements`."""

import os
from functools import partial
from inspect import cleandoc
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click

from picbench.cli.guard import CommandGroup, GuardedCommand
from picbench.cli.options import make_option

if TYPE_CHECKING:
    from picbench.experiments.measurements import Measurement


class MeasureGroup(CommandGroup):
    """A group whose commands are made when they are needed: one for each measurement of a name.

    The command of ``algorithms serve`` is `serve` in the group `algorithms`.
    """

    @property
    def commands(self) -> dict[str, click.Command]:
        """See `click.Group`."""
        from picbench.experiments.measurements import GROUPS, MEASUREMENTS

        if not self._added:
            self._added = True
            groups = {name: CommandGroup(name, help=text) for name, text in GROUPS.items()}
            self._commands.update(groups)
            for found in MEASUREMENTS:
                *above, name = found.name.split()
                group: click.Group = self
                if above:
                    group = groups[above[0]]
                group.add_command(_command(name, found))
        return self._commands

    @commands.setter
    def commands(self, commands: dict[str, click.Command]) -> None:
        self._commands, self._added = commands, False


def _command(name: str, found: "Measurement") -> click.Command:
    options = [make_option(*field) for field in found.settings.model_fields.items()]
    text = cleandoc(found.settings.__doc__ or "")
    return GuardedCommand(name, params=options, callback=partial(_measure, found), help=text)


def _measure(found: "Measurement", **flags: Any) -> int:
    from picbench.settings import parse_settings

    if found.exact:
        # Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    settings = parse_settings(found.settings, flags, f"picbench measure {found.name}")
    outcome = resolve_name(f"picbench.experiments.{found.function}")(settings)
    if outcome.page:
        click.echo(outcome.page)
    return int(outcome.code)


@click.group(cls=MeasureGroup)
def measure() -> None:
    """Measure and check parts of picbench by themselves."""
