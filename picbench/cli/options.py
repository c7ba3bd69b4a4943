"""Flags made of settings, and what a shell offers for --algo, --dataset and --model.

click makes the completion of commands and flags: `_PICBENCH_COMPLETE=bash_source picbench` prints
what bash has to be given, and `zsh_source` and `fish_source` what these do.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from picbench.cli.guard import LazyOptions
from picbench.files import check_place

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Command = TypeVar("Command", bound=Callable[..., Any])


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


class _Share(click.ParamType):  # type: ignore[type-arg]  # Older click has no argument.
    """``K/N`` as (k, n)."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = re.fullmatch(r"(\d+)/(\d+)", value)
        share = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= share[0] <= share[1]:
            self.fail(f"{value!r}: not like 1/2", param, ctx)
        return share


class _Pair(click.ParamType):  # type: ignore[type-arg]
    """``A,B`` as (A, B)."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = tuple(name.strip() for name in value.split(","))
        if len(names) != 2 or not all(names):
            self.fail(f"{value!r}: not two names, like full,mepic", param, ctx)
        return names


FILE = Place(path_type=Path, dir_okay=False)
FOLDER = Place(path_type=Path, file_okay=False)

#: The types of fields that `picbench.settings` marks by a word.
_MARKED: "Mapping[str, click.ParamType[Any]]" = {
    **{"file": FILE, "folder": FOLDER},
    **{"share": _Share(), "pair": _Pair()},
}

QUIET = click.option(
    "--quiet", is_flag=True, help="Print nothing but the last line of JSON, and errors on stderr."
)


def style_of(*names: str, help: str) -> Callable[[Command], Command]:
    """The option --format, called `style`; the first of its `names` is the default."""
    kind = click.Choice(names)
    return click.option(
        "--format", "style", type=kind, default=names[0], show_default=True, help=help
    )


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def options_of(
    where: str,
    /,
    *,
    only: Collection[str] | None = None,
    bounds: bool = True,
    unset: bool = False,
    **changes: Mapping[str, Any],
) -> Callable[[Command], Command]:
    """A decorator that gives a command an option for each field of a model, or for `only` some.

    `where` is its ``module:name``, imported when flags are needed, so that help lists commands
    without it. Help is the field's description, choices are those of a `Literal`. Without `bounds`
    it is left to the model to refuse numbers, and with `unset` to fill in defaults. `changes` has
    arguments of `click.Option` by field.
    """

    def options() -> list[click.Option]:
        return [
            make_option(name, field, bounds=bounds, unset=unset, **changes.get(name, {}))
            for name, field in resolve_name(where).model_fields.items()
            if only is None or name in only
        ]

    def decorate(command: Command) -> Command:
        given: list[object] = command.__dict__.setdefault("__click_params__", [])
        given.append(LazyOptions(options))
        return command

    return decorate


def make_option(
    name: str, field: "FieldInfo", *, bounds: bool = True, unset: bool = False, **changes: Any
) -> click.Option:
    """The option of a field; `changes` are other arguments of `click.Option`."""
    extra: Mapping[str, Any] = field.json_schema_extra  # type: ignore[assignment]
    flag = extra["flag"] or f"--{name.replace('_', '-')}"
    kind, marks = _given_kind(field)
    text = " ".join((field.description or "").split())
    if kind is bool:
        return click.Option([flag, name], is_flag=True, help=text)
    empty = field.is_required() or field.default in (None, ())
    shown = extra["shown"]
    wanted: dict[str, Any] = {
        "help": text,
        "metavar": extra["metavar"],
        "multiple": get_origin(kind) is tuple and not marks,
        "show_default": shown if isinstance(shown, str) else shown and not empty,
        "required": field.is_required(),
        "type": _click_type(kind, marks, field.metadata if bounds else (), extra["metavar"] or ""),
    }
    if unset and not empty:
        wanted["show_default"] = str(field.default)
    elif not empty:
        wanted["default"] = "/".join(map(str, field.default)) if "share" in marks else field.default
    return click.Option([flag, name], **wanted | changes)


def _given_kind(field: "FieldInfo") -> tuple[Any, Sequence[str]]:
    """The type of a field's value where it is given, and the words that mark it."""
    marks = [mark for mark in field.metadata if isinstance(mark, str)]
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        [kind] = [part for part in get_args(kind) if part is not NoneType]
    if get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
    return kind, marks


def _click_type(kind: Any, marks: Sequence[str], bounds: Sequence[Any], shown: str) -> Any:
    if marks:
        return _MARKED[marks[0]]
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    limits: dict[str, Any] = {}
    for bound in bounds:
        for word, end in (("ge", "min"), ("gt", "min"), ("le", "max"), ("lt", "max")):
            if (value := getattr(bound, word, None)) is not None:
                limits |= {end: value, f"{end}_open": word in ("gt", "lt")}
    if limits and kind in (int, float):
        return click.IntRange(**limits) if kind is int else click.FloatRange(**limits)
    # Shells complete what help calls a path, among other things.
    return click.Path() if kind is str and re.search("DIR|FILE|PATH", shown) else kind


def own_values(context: click.Context, names: Collection[str]) -> dict[str, Any]:
    """The values of those options that were given on the command line, and not left to defaults."""
    unset = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    given = (name for name in names if context.get_parameter_source(name) not in unset)
    return {name: context.params[name] for name in given}


_RUN = "picbench.settings:RunConfig"
DEVICE = options_of(_RUN, only=("device",))
DTYPE = options_of(_RUN, only=("dtype",))
OFFLINE = options_of(_RUN, only=("offline",))


def complete(where: str, path: str | None = None) -> Callable[..., list[CompletionItem]]:
    """What a shell offers: the names that ``module:function`` lists, after commas as well.

    Where no name fits it offers what is at a `path`: "file", or "dir" for folders alone.
    """

    def offer(
        context: click.Context, parameter: click.Parameter, word: str
    ) -> list[CompletionItem]:
        before, comma, last = word.rpartition(",")
        names = [name for name in resolve_name(where)() if name.startswith(last)]
        if path and not names:
            return [CompletionItem(word, type=path)]
        return [CompletionItem(before + comma + name) for name in names]

    return offer
