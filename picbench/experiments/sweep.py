"""A cell of a sweep: its name, its settings, and where in the file these are."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.engines.chunk_cache.tiers.kinds import without_credentials
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.errors import ConfigError, PicBenchError, closest
from picbench.run.arm import parse_arms
from picbench.run.job import Job, prepare
from picbench.run.result import arms_of
from picbench.run.session import Services
from picbench.run.workload import Workload
from picbench.settings import RunConfig, parse_config
from picbench.store.manifest import FINAL
from picbench.store.reader import Run, read_run
from picbench.store.writer import MANIFEST

#: A setting in backticks, with or without a value.
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(=[^`]*)?`")

#: Longer names are cut, and end in a hash.
_LONGEST = 120

#: What stands for characters that shells and other programs read differently.
_INSTEAD = str.maketrans({",": "+", ":": "_"})


@dataclass(frozen=True, slots=True)
class Places:
    """Where in the file `path` each setting of a cell is, such as ``grid.algo[2]``."""

    path: Path
    settings: Mapping[str, str]

    def put_into(self, text: str) -> str:
        """A message with places instead of settings in backticks, where they are in the file."""
        return _FIELD.sub(self._place, text)

    def _place(self, found: re.Match[str]) -> str:
        name, value = found.groups()
        place = self.settings.get(name)
        if place is None:
            return found[0]
        return place if value is None else f"{place}: {value.removeprefix('=')}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put file and places into the ConfigErrors that a cell's settings raise."""
        try:
            yield
        except ConfigError as error:
            hint = self.put_into(error.hint)
            raise ConfigError(f"{self.path}: {self.put_into(error.message)}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One combination of a grid's values, to be measured for the `repeat`-th time, from 1.

    `settings` has these values as they may be shown, `config` all settings of the run.
    """

    name: str
    settings: Mapping[str, Any]
    repeat: int
    config: RunConfig
    places: Places

    @property
    def path(self) -> Path:
        """The run directory."""
        assert self.config.output is not None
        return Path(self.config.output)

    def reason(self, error: PicBenchError) -> str:
        """An error as the reason why the cell failed, on one line."""
        return " ".join(self.places.put_into(str(error)).split())


def cell_name(settings: Mapping[str, Any], repeat: int) -> str:
    """A name for a folder, the same whatever other cells there are and in whatever order.

    Different cells have different names: a value that cannot be written in one is told apart by a
    hash.
    """
    known = dict(sorted(settings.items()))
    texts = {name: _text(value) for name, value in known.items()}
    name = ",".join(f"{name}={text.translate(_INSTEAD)}" for name, text in texts.items())
    if repeat > 1:
        name += f",repeat={repeat}"
    plain = all(re.fullmatch(r"[A-Za-z0-9.,:=-]+", text) for text in texts.values())
    if plain and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(json.dumps([known, repeat]).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.,+=_-]', '-', name)[:_LONGEST]}-{digest}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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


#: Settings that no workload depends on: of engines, of the order of requests, of what is written.
UNREAD = frozenset(
    {
        "arm",
        "cache",
        "compile_order",
        "concurrency",
        "device",
        "dtype",
        "eager",
        "keys_without_rope",
        "kv_blocks",
        "max_running",
        "on_pressure",
        "output",
        "repeats",
        "same_engine",
        "self_check",
        "shared_decode",
        "slo",
        "tensor_parallel",
        "tiers",
    }
)

#: Prompt tokens that are kept at a time; a token takes about 40 bytes.
ROOM = 20_000_000


class SharedWorkloads:
    """Loads workloads for configurations that will ask for them, `uses` in all.

    A workload stays until its last use, as far as there is room; otherwise it is loaded again.
    """

    def __init__(
        self,
        load: Callable[[RunConfig], Workload],
        uses: Iterable[RunConfig],
        room: int = ROOM,
    ) -> None:
        self._load = load
        self._left = Counter(map(_decisive, uses))
        self._room = room
        self._kept: dict[str, Workload] = {}

    def load(self, config: RunConfig) -> Workload:
        """The workload of a configuration; raises what loading it raises."""
        key = _decisive(config)
        found = self._kept.get(key) or self._load(config)
        self._left[key] -= 1
        self._settle(key, found)
        return found

    def _settle(self, key: str, workload: Workload) -> None:
        """Keep a workload that is needed again, where there is room for it."""
        if self._left[key] <= 0:
            self._kept.pop(key, None)
        elif self._tokens(workload, *self._kept.values()) <= self._room:
            self._kept[key] = workload

    @staticmethod
    def _tokens(*workloads: Workload) -> int:
        return sum(sample.prompt_tokens for workload in workloads for sample in workload.samples)


def _decisive(config: RunConfig) -> str:
    return config.model_dump_json(exclude=set(UNREAD))


#: The state of a cell of which there is nothing.
MISSING = "missing"


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What an arm has done in a cell: prompt tokens of its requests, and its busy seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A checked cell; `requests` and tokens are those of each arm, of all repeats together.

    `state` is the status of its run. `output_tokens` are those of replies as long as they may be.
    `pool` is each arm's, in blocks; `pool_bytes` is that of all arms in the type of the model or
    the settings, None where the model's configuration does not tell it. `done` has what was
    measured already, by arm.
    """

    cell: SweepCell
    state: str
    arms: tuple[str, ...]
    requests: int
    prompt_tokens: int
    output_tokens: int
    pool: int
    pool_bytes: int | None
    done: Mapping[str, MeasuredWork] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether the cell is kept as it is."""
        return self.state in FINAL

    def tokens_left(self, arm: str) -> int:
        """Prompt tokens that the arm has not been measured with."""
        known = self.done.get(arm)
        return max(0, self.prompt_tokens - (known.tokens if known else 0))


def with_shared_workloads(cells: Sequence[SweepCell], services: Services, *, run: bool) -> Services:
    """Services for a sweep that is planned and, if `run`, run: they load a workload once."""
    left = [cell for cell in cells if run and _measured(cell.path)[0] not in FINAL]
    uses = [cell.config for cell in (*cells, *left)]
    return replace(services, load=SharedWorkloads(services.load, uses).load)


def plan_sweep(cells: Sequence[SweepCell], services: Services) -> Iterator[PlannedCell]:
    """Prepare every cell, one after another; ConfigError for one that cannot run."""
    for cell in cells:
        with cell.places.named():
            planned = _planned(cell, prepare(cell.config, services.load, services.memory))
        yield planned


def _planned(cell: SweepCell, job: Job) -> PlannedCell:
    state, done = _measured(cell.path)
    samples, times = job.workload.samples, job.config.repeats
    return PlannedCell(
        cell=cell,
        state=state,
        arms=tuple(arm.name for arm in job.arms),
        requests=times * len(samples),
        prompt_tokens=times * sum(sample.prompt_tokens for sample in samples),
        output_tokens=times * sum(sample.max_tokens for sample in samples),
        pool=job.sizes.pool,
        pool_bytes=pool_bytes(job),
        done=done,
    )


def _measured(path: Path) -> tuple[str, dict[str, MeasuredWork]]:
    if not (path / MANIFEST).exists():
        return MISSING, {}
    run = read_run(path)
    return run.manifest["status"], work_of(run)


def work_of(run: Run) -> dict[str, MeasuredWork]:
    """What each arm of a run has done so far."""
    arms = arms_of(run).items()
    return {name: MeasuredWork(arm.tokens.prompt, arm.busy_s) for name, arm in arms}


def pool_bytes(job: Job) -> int | None:
    """Bytes of the KV pools of all engines here; None if the model does not tell them."""
    try:
        model = read_model_config(str(job.workload.model.path))
    except ConfigError:
        return None
    ours = [arm for arm in job.arms if arm.endpoint is None]
    footprints = [GpuFootprint.of(job.engine(arm), model) for arm in ours]
    known = [found.block for found in footprints if found is not None]
    ranks = job.config.tensor_parallel
    return job.sizes.pool * sum(known) * ranks if len(known) == len(footprints) else None


class ArmRates:
    """Busy seconds of arms for each prompt token, over the work of several runs or cells."""

    def __init__(self, works: Iterable[Mapping[str, MeasuredWork]]) -> None:
        self._work: dict[str, list[MeasuredWork]] = {}
        #: Of how many runs or cells something is known.
        self.known = 0
        for done in works:
            work = {arm: one for arm, one in done.items() if one.tokens and one.seconds}
            self.known += bool(work)
            for arm, one in work.items():
                self._work.setdefault(arm, []).append(one)

    def of(self, arm: str) -> float:
        """Seconds a prompt token; of an arm that was never measured the mean of all arms."""
        everything = [one for work in self._work.values() for one in work]
        work = self._work.get(arm, everything)
        return sum(one.seconds for one in work) / sum(one.tokens for one in work)


class TimeEstimate:
    """Seconds that cells will take, from what was measured in these and other cells.

    An arm takes its mean busy seconds for each prompt token, in all cells that have it; one that
    was never measured takes the mean of all arms. Starts of engines are not in it.
    """

    def __init__(self, planned: Sequence[PlannedCell]) -> None:
        self._rates = ArmRates(cell.done for cell in planned)
        self.cells = self._rates.known

    def seconds(self, cell: PlannedCell) -> float | None:
        """What is left of a cell; None where no cell was measured."""
        if not self.cells:
            return None
        if cell.ended:
            return 0.0
        return sum(cell.tokens_left(arm) * self._rates.of(arm) for arm in cell.arms)
