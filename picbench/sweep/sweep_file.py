"""The YAML file of a sweep, checked, and the cells of its grid."""

import itertools
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.arms.arm import parse_arms
from picbench.engines.chunk_cache.tiers.kinds import without_credentials
from picbench.errors import ConfigError
from picbench.names import closest
from picbench.run.config import RunConfig, parse_config
from picbench.sweep.sweep_cell import Places, SweepCell, cell_name

#: Settings that hold for all cells, and that no file has.
_OF_COMMAND = ("output", "offline")

#: Settings that are flags which can be repeated: a value is one of them, or a list.
_SEVERAL = ("algo", "arm")


class SweepFile(BaseModel):
    """A sweep: settings that all cells have, and the values of those that differ.

    Both are settings of `RunConfig`. Every combination of the grid's values is a cell, and each
    cell is measured `repeats` times.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field("", pattern=r"^[\w.-]*$")
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    repeats: int = Field(1, ge=1)


def read_sweep(path: Path) -> SweepFile:
    """Read a file; ConfigError says where in it something is wrong.

    A sweep without a name has that of its file.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_OnceLoader)
        sweep = SweepFile.model_validate(found)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name a YAML file") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}{error.problem}", hint="it must be YAML") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint="it must be YAML") from error
    except ValidationError as error:
        raise _fault(path, error) from error
    _check_settings(path, sweep)
    _check_once(path, sweep)
    return sweep if sweep.name else sweep.model_copy(update={"name": path.stem})


def expand(path: Path, sweep: SweepFile, output: Path, *, offline: bool = False) -> list[SweepCell]:
    """The cells of the sweep in `path`, in the grid's order, with run directories below `output`.

    Raises ConfigError for the first setting that is wrong, with its place in the file.
    """
    axes = [range(len(values)) for values in sweep.grid.values()]
    common = {"offline": offline}
    return [
        _cell(path, sweep, dict(zip(sweep.grid, point, strict=True)), output, repeat, common)
        for point in itertools.product(*axes)
        for repeat in range(1, sweep.repeats + 1)
    ]


class _OnceLoader(yaml.SafeLoader):
    """Plain values only; a key that is there twice is an error, where YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is there twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _cell(
    path: Path,
    sweep: SweepFile,
    point: dict[str, int],
    output: Path,
    repeat: int,
    common: dict[str, Any],
) -> SweepCell:
    """The cell at a point of the grid: the number of each setting's value."""
    places = Places(
        path,
        {name: f"base.{name}" for name in sweep.base}
        | {name: f"grid.{name}[{number}]" for name, number in point.items()},
    )
    chosen = {name: sweep.grid[name][number] for name, number in point.items()}
    values = {name: _setting(name, value) for name, value in (sweep.base | chosen).items()}
    with places.named():
        config = parse_config(values | common)
        parse_arms(config.algo, same_engine=config.same_engine)
        shown = {name: _shown(name, values[name]) for name in point}
    name = cell_name(shown, repeat)
    config = config.model_copy(update={"output": str(output / name)})
    return SweepCell(name, shown, repeat, config, places)


def _setting(name: str, value: Any) -> Any:
    """A value of the file as `RunConfig` takes it."""
    if name in _SEVERAL:
        return tuple(value) if isinstance(value, list) else (value,)
    word = "on" if value is True else "off"
    if isinstance(value, bool) and word in get_args(RunConfig.model_fields[name].annotation):
        return word  # YAML 1.1 reads on and off as true and false.
    return value


def _shown(name: str, value: Any) -> Any:
    """A value for files that are passed on: without passwords."""
    if name in _SEVERAL:
        return ",".join(value)
    return without_credentials(value) if name == "tiers" and value else value


def _fault(path: Path, error: ValidationError) -> ConfigError:
    # A field that is written wrong is unknown and missing: the first says more.
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    where = f"{path}: {where.removeprefix('.')}: " if where else f"{path}: "
    if first["type"] == "extra_forbidden":
        hint = closest(str(first["loc"][-1]), SweepFile.model_fields)
        return ConfigError(f"{where}no such field", hint=hint)
    message = "no mapping" if first["type"] == "model_type" else first["msg"].lower()
    return ConfigError(
        f"{where}{message}",
        hint="a sweep has base: {dataset: musique} and grid: {algo: [mepic, naive]}",
    )


def _check_settings(path: Path, sweep: SweepFile) -> None:
    known = [name for name in RunConfig.model_fields if name not in _OF_COMMAND]
    for part, names in (("base", sweep.base), ("grid", sweep.grid)):
        for name in names:
            if name in _OF_COMMAND:
                raise ConfigError(
                    f"{path}: {part}.{name}: holds for all cells", hint=f"give it as `{name}`"
                )
            if name not in known:
                hint = closest(name, known)
                raise ConfigError(f"{path}: {part}.{name}: no such setting", hint=hint)
    if "algo" not in sweep.base.keys() | sweep.grid.keys():
        raise ConfigError(
            f"{path}: no algo in base or grid", hint="add base: {algo: [full, mepic]}"
        )


def _check_once(path: Path, sweep: SweepFile) -> None:
    for name, values in sweep.grid.items():
        if name in sweep.base:
            raise ConfigError(f"{path}: grid.{name}: is in base, too", hint="remove one of them")
        texts = [json.dumps(_setting(name, value), default=str) for value in values]
        _check_different(path, name, texts)


def _check_different(path: Path, name: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        if text in texts[:number]:
            first = texts.index(text)
            raise ConfigError(
                f"{path}: grid.{name}[{number}]: is {text}, as grid.{name}[{first}] is",
                hint="repeats: 2 measures each cell twice",
            )
