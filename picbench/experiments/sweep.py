"""A sweep: every combination of a grid's settings, each a run of its own with its own engines."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO, get_args

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picbench.engines.chunk_cache.tiers.kinds import without_credentials
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.errors import ConfigError, PicBenchError, closest
from picbench.figures.run import write_run_files
from picbench.files import check_place, write_json, write_whole
from picbench.run.arm import parse_arms
from picbench.run.job import Job, prepare
from picbench.run.result import arms_of, headline, print_all
from picbench.run.schedule import Progress, minutes
from picbench.run.session import Services, execute
from picbench.run.workload import Workload
from picbench.settings import RunConfig, parse_config
from picbench.store import provenance
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary, labels_of
from picbench.store.writer import FINAL, MANIFEST
from picbench.tables.run import arms_frame, arms_table, short_caption, warnings_of
from picbench.tables.table import NOTHING, Column, Shown, Table, Value

#: What a sweep's folder is recognised by, with its cells and their settings.
SWEEP = "sweep.json"

#: The state of a cell without a run.
MISSING = "missing"

#: Settings that hold for all cells, and that no file has.
_OF_COMMAND = ("output", "offline")

#: Settings that are flags which can be repeated: a value is one of them, or a list.
_SEVERAL = ("algo", "arm")

#: Settings that no workload depends on: of engines, of the order of requests, of what is written.
UNREAD = frozenset(
    {
        *("arm", "cache", "compile_order", "concurrency", "device", "dtype", "eager"),
        *("keys_without_rope", "kv_blocks", "max_running", "on_pressure", "output", "repeats"),
        *("same_engine", "self_check", "shared_decode", "slo", "tensor_parallel", "tiers"),
    }
)

#: Prompt tokens of the workloads that are kept; a token takes about 40 bytes.
ROOM = 20_000_000


@dataclass(frozen=True, slots=True)
class Places:
    """Where in the file `path` each setting of a cell is, such as ``grid.algo[2]``."""

    path: Path
    settings: Mapping[str, str]

    def put_into(self, text: str) -> str:
        """A message with places instead of settings in backticks, where they are in the file."""

        def place(found: re.Match[str]) -> str:
            name, value = found.groups()
            known = self.settings.get(name, found[0])
            return f"{known}: {value[1:]}" if value and name in self.settings else known

        return re.sub(r"`([a-z][a-z0-9_]*)(=[^`]*)?`", place, text)

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


def cell_name(settings: Mapping[str, Any], repeat: int) -> str:
    """A name for a folder, the same whatever other cells there are and in whatever order.

    Different cells have different names: a value that cannot be written in one is told apart by a
    hash, and so are names that are cut.
    """
    known = dict(sorted(settings.items()))
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in known.items()}
    # Shells and other programs read commas and colons differently.
    written = str.maketrans({",": "+", ":": "_"})
    name = ",".join(f"{key}={text.translate(written)}" for key, text in texts.items())
    if repeat > 1:
        name += f",repeat={repeat}"
    plain = all(re.fullmatch(r"[A-Za-z0-9.,:=-]+", text) for text in texts.values())
    if plain and len(name) <= 120:
        return name
    digest = hashlib.sha256(json.dumps([known, repeat]).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.,+=_-]', '-', name)[:120]}-{digest}"


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


class _OnceLoader(yaml.SafeLoader):
    """Plain values only; a key that is there twice is an error, where YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                problem = f"{key.value} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


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
        message, hint = _refused(error)
        raise ConfigError(f"{path}: {message}", hint=hint) from error
    for message, hint in _faults(sweep):
        raise ConfigError(f"{path}: {message}", hint=hint)
    return sweep if sweep.name else sweep.model_copy(update={"name": path.stem})


def _refused(error: ValidationError) -> tuple[str, str]:
    # A field that is written wrong is unknown and missing: the first says more.
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    where = f"{where.removeprefix('.')}: " if where else ""
    if first["type"] == "extra_forbidden":
        return f"{where}no such field", closest(str(first["loc"][-1]), SweepFile.model_fields)
    message = "no mapping" if first["type"] == "model_type" else first["msg"].lower()
    hint = "a sweep has base: {dataset: musique} and grid: {algo: [mepic, naive]}"
    return f"{where}{message}", hint


def _faults(sweep: SweepFile) -> Iterator[tuple[str, str]]:
    """What is wrong with names and values, with hints."""
    known = [name for name in RunConfig.model_fields if name not in _OF_COMMAND]
    for part, names in (("base", sweep.base), ("grid", sweep.grid)):
        for name in names:
            if name in _OF_COMMAND:
                yield f"{part}.{name}: holds for all cells", f"give it as `{name}`"
            if name not in known:
                yield f"{part}.{name}: no such setting", closest(name, known)
    if "algo" not in sweep.base.keys() | sweep.grid.keys():
        yield "no algo in base or grid", "add base: {algo: [full, mepic]}"
    for name, values in sweep.grid.items():
        if name in sweep.base:
            yield f"grid.{name}: is in base, too", "remove one of them"
        texts = [json.dumps(_setting(name, value), default=str) for value in values]
        for number, text in enumerate(texts):
            if (first := texts.index(text)) < number:
                same = f"is {text}, as grid.{name}[{first}] is"
                yield f"grid.{name}[{number}]: {same}", "repeats: 2 measures each cell twice"


def expand(path: Path, sweep: SweepFile, output: Path, *, offline: bool = False) -> list[SweepCell]:
    """The cells of the sweep in `path`, in the grid's order, with run directories below `output`.

    Raises ConfigError for the first setting that is wrong, with its place in the file.
    """
    cells = []
    for point in itertools.product(*map(enumerate, sweep.grid.values())):
        own = dict(zip(sweep.grid, point, strict=True))
        places = {name: f"base.{name}" for name in sweep.base}
        places |= {name: f"grid.{name}[{number}]" for name, (number, _) in own.items()}
        given = sweep.base | {name: value for name, (_, value) in own.items()}
        values = {name: _setting(name, value) for name, value in given.items()}
        found = Places(path, places)
        with found.named():
            config = parse_config({**values, "offline": offline})
            parse_arms(config.algo, same_engine=config.same_engine)
            shown = {name: _shown(name, values[name]) for name in own}
        for repeat in range(1, sweep.repeats + 1):
            name = cell_name(shown, repeat)
            placed = config.model_copy(update={"output": str(output / name)})
            cells.append(SweepCell(name, shown, repeat, placed, found))
    return cells


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


class SharedWorkloads:
    """Loads each workload once, as far as there is room to keep it."""

    def __init__(self, load: Callable[[RunConfig], Workload], room: int = ROOM) -> None:
        self._load, self._room = load, room
        self._kept: dict[str, Workload] = {}

    def load(self, config: RunConfig) -> Workload:
        """The workload of a configuration; raises what loading it raises."""
        key = config.model_dump_json(exclude=set(UNREAD))
        if key not in self._kept:
            found = self._load(config)
            tokens = sum(sample.prompt_tokens for sample in found.samples)
            if tokens > self._room:
                return found
            self._room -= tokens
            self._kept[key] = found
        return self._kept[key]


class MeasuredWork(NamedTuple):
    """What an arm has done: prompt tokens of its requests, and its busy seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A checked cell; `requests` and tokens are those of each arm, of all repeats together.

    `state` is the status of its run. `output_tokens` are those of replies as long as they may be.
    `pool` is each arm's, in blocks; `pool_bytes` is that of all arms, None where the model's
    configuration does not tell it. `done` has what was measured already, by arm.
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

    @property
    def fate(self) -> str:
        """The state, and what becomes of the cell."""
        if self.ended:
            return f"{self.state}: kept"
        return self.state if self.state == MISSING else f"{self.state}: will be resumed"

    def tokens_left(self, arm: str) -> int:
        """Prompt tokens that the arm has not been measured with."""
        return max(0, self.prompt_tokens - (self.done[arm].tokens if arm in self.done else 0))


def plan_sweep(cells: Sequence[SweepCell], services: Services) -> Iterator[PlannedCell]:
    """Prepare every cell, one after another; ConfigError for one that cannot run."""
    for cell in cells:
        with cell.places.named():
            job = prepare(cell.config, services.load, services.memory)
            run = read_run(cell.path) if (cell.path / MANIFEST).exists() else None
            counts = (*_work_of_arm(job), job.sizes.pool, pool_bytes(job))
        state = run.manifest["status"] if run else MISSING
        done = work_of(run) if run else {}
        yield PlannedCell(cell, state, tuple(arm.name for arm in job.arms), *counts, done)


def _work_of_arm(job: Job) -> tuple[int, int, int]:
    """Requests, prompt tokens and output tokens at most of each arm, over all repeats."""
    samples, times = job.workload.samples, job.config.repeats
    prompt = sum(sample.prompt_tokens for sample in samples)
    return times * len(samples), times * prompt, times * sum(s.max_tokens for s in samples)


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


class TimeEstimate:
    """Seconds that cells or runs will take, from the work of arms in others, `cells` of these.

    An arm takes its mean busy seconds for each prompt token; one that was never measured takes the
    mean of all arms. Starts of engines are not in it.
    """

    def __init__(self, works: Iterable[Mapping[str, MeasuredWork]]) -> None:
        known = [[(arm, w) for arm, w in done.items() if all(w)] for done in works]
        self._work = list(itertools.chain.from_iterable(known))
        self.cells = sum(map(bool, known))

    def rate(self, arm: str) -> float:
        """Seconds a prompt token."""
        own = [work for name, work in self._work if name == arm]
        work = own or [work for _, work in self._work]
        return sum(one.seconds for one in work) / sum(one.tokens for one in work)

    def seconds(self, cell: PlannedCell) -> float | None:
        """What is left of a cell; None where nothing was measured."""
        if not self.cells:
            return None
        return sum(cell.tokens_left(arm) * self.rate(arm) for arm in cell.arms if not cell.ended)


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Tokens of all arms and repeats, bytes of all pools, and seconds of all arms together.

    `output_tokens` are those of replies as long as they may be. Seconds are None without one of
    `runs`, earlier ones of the same model and settings on the same hardware; bytes where the
    model's configuration does not tell them. Starts of engines are not in the seconds.
    """

    prompt_tokens: int
    output_tokens: int
    pool_bytes: int | None
    seconds: float | None
    runs: int


def estimate_run(job: Job, runs: Path) -> RunEstimate:
    """Estimate a job from its requests and from the latest 20 runs like it below `runs`."""
    _, prompt, output = _work_of_arm(job)
    found = TimeEstimate(itertools.islice(_alike(job, runs), 20))
    seconds = sum(prompt * found.rate(arm.name) for arm in job.arms) if found.cells else None
    arms = len(job.arms)
    return RunEstimate(prompt * arms, output * arms, pool_bytes(job), seconds, found.cells)


def _alike(job: Job, folder: Path) -> Iterator[Mapping[str, MeasuredWork]]:
    """What arms did in runs that are comparable in speed, the latest first."""
    here: Mapping[str, Any] = provenance.collect()
    config = job.config.model_dump()
    decisive = ("model", "dtype", "device", "tensor_parallel", "eager", "concurrency")
    for manifest in sorted(folder.glob(f"*/{MANIFEST}"), reverse=True):
        try:
            run = read_run(manifest.parent)
            then, known = run.manifest["provenance"], run.manifest["config"]
            if (
                run.manifest["status"] == "complete"
                and (then["cpu"]["model"], then["gpus"]) == (here["cpu"]["model"], here["gpus"])
                and all(known[name] == config[name] for name in decisive)
            ):
                yield work_of(run)
        except (PicBenchError, KeyError):  # A run that cannot be read tells nothing.
            continue


def print_sweep_plan(planned: Sequence[PlannedCell], stream: TextIO) -> None:
    """The cells, what there is of them, and what is left to do; what the columns mean."""
    estimate = TimeEstimate(cell.done for cell in planned)
    rows: list[list[Value]] = []
    for cell in planned:
        arms, seconds = len(cell.arms), estimate.seconds(cell)
        pools = None if cell.pool_bytes is None else cell.pool_bytes / 2**20
        left = None if seconds is None else Shown(minutes(seconds), seconds)
        tokens = (cell.prompt_tokens * arms, cell.output_tokens * arms)
        requests = f"{cell.requests:,} x {arms} arms"
        rows.append([cell.cell.name, cell.fate, requests, *tokens, cell.pool, pools, left])
    head = (
        *("cell", "state", "requests", "prompt\ntokens", "output\ntokens", "KV blocks"),
        *("KV pools\nMiB", "time left\nmin:s"),
    )
    unended = [cell for cell in planned if not cell.ended]
    asked = sum(cell.requests * len(cell.arms) for cell in unended)
    open_tokens = sum(cell.tokens_left(arm) for cell in unended for arm in cell.arms)
    time = "not known before a cell is measured."
    if estimate.cells:
        counted = f"{estimate.cells} measured {'cell' if estimate.cells == 1 else 'cells'}"
        total = minutes(sum(estimate.seconds(cell) or 0.0 for cell in unended))
        time = (
            f"{total} in all, by each arm's busy seconds a prompt token in {counted}; starts of "
            "engines are not in it."
        )
    print_all(
        stream,
        "dry run: no engine was started, nothing was written",
        Table("Cells", [*map(Column, head)], rows),
        f"{len(planned)} cells: {_counted(cell.fate for cell in planned)}; those to run have "
        f"{asked:,} requests and {open_tokens:,} prompt tokens left",
        "requests, tokens (output: at most), KV pools: of all arms of a cell.",
        f"time left: {time}",
    )


def _counted(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


@dataclass(frozen=True, slots=True)
class CellResult:
    """How far a cell is: the status of its run, or ``failed`` or ``missing`` where there is none.

    `reason` says why it is not complete, as far as that is known.
    """

    cell: SweepCell
    status: str
    reason: str | None
    run: Run | None

    @property
    def arms(self) -> Mapping[str, ArmSummary]:
        """The summaries of what was measured."""
        return arms_of(self.run) if self.run else {}

    @property
    def complete(self) -> bool:
        """Whether all its requests were measured, and mean something."""
        return self.status == "complete"


def read_cell(cell: SweepCell, reason: str | None = None) -> CellResult:
    """A cell as its directory has it; `reason` is that of an error which was just raised."""
    if not (cell.path / MANIFEST).exists():
        return CellResult(cell, MISSING if reason is None else "failed", reason, None)
    run = read_run(cell.path)
    status = run.manifest["status"]
    if status == "partial":
        arms = run.summary.values()
        failed, total = sum(arm.failed for arm in arms), sum(arm.requests for arm in arms)
        reason = f"{failed} of {total} requests failed"
    return CellResult(cell, status, reason or run.manifest["reason"], run)


def open_sweep(name: str, cells: Sequence[SweepCell], folder: Path) -> None:
    """Make the folder of a sweep and say in it what its cells are.

    Raises ConfigError where it has something else in it.
    """
    check_folder(folder)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    settings = {cell.name: {**cell.settings, "repeat": cell.repeat} for cell in cells}
    write_json(folder / SWEEP, {"name": name, "cells": settings})


def check_folder(folder: Path) -> None:
    """ConfigError unless the folder is absent below another, empty, or a sweep's."""
    with _writable(folder):
        check_place(folder)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (folder / SWEEP).is_file():
        raise ConfigError(
            f"`output` {folder}: exists and is not a sweep's", hint="name a new folder"
        )


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"`output` {folder}: cannot be written: {error.strerror}"
        raise ConfigError(message, hint="name another folder") from error


class SweepRun:
    """Runs cells one after another, and knows how far all of them are.

    `display` shows the progress of so many requests, `say` prints a line.
    """

    def __init__(
        self,
        planned: Sequence[PlannedCell],
        services: Services,
        display: Callable[[int], AbstractContextManager[Progress]],
        say: Callable[[str], None],
    ) -> None:
        self._planned, self._services = planned, services
        self._display, self._say = display, say
        self._ended: dict[str, CellResult] = {}

    @property
    def results(self) -> list[CellResult]:
        """All cells, in the grid's order; those that were not run by now as they are on disk."""
        cells = (plan.cell for plan in self._planned)
        return [self._ended.get(cell.name) or read_cell(cell) for cell in cells]

    def __iter__(self) -> Iterator[CellResult]:
        """Run the cells that have not ended, and yield every cell as it is then.

        A cell that fails does not stop the others. Whatever else stops the sweep, the cell under
        way keeps its results.
        """
        for number, plan in enumerate(self._planned, 1):
            cell, services, reason = plan.cell, self._services, None
            try:
                if not plan.ended:
                    with self._display(plan.requests * len(plan.arms)) as progress:
                        progress.say(f"cell {number} of {len(self._planned)}: {cell.name}")
                        job = prepare(cell.config, services.load, services.memory)
                        execute(job, services.launch, progress)
                    for line in (services.files or write_run_files)(cell.path):
                        self._say(f"{cell.name}: {line}")
            except PicBenchError as error:
                reason = " ".join(cell.places.put_into(str(error)).split())
            self._ended[cell.name] = result = read_cell(cell, reason)
            if not result.complete:
                self._say(f"{cell.name}: {result.status}: {result.reason}")
            yield result


def sweep_line(folder: Path, results: Sequence[CellResult], exit_code: int) -> str:
    """One line of JSON about a sweep whose command ends with `exit_code`; see `status_line`."""
    cells = [
        {
            "cell": result.cell.name,
            "run": str(result.cell.path) if result.run else None,
            "status": result.status,
            "reason": result.reason,
            "arms": {name: headline(arm) for name, arm in result.arms.items()},
        }
        for result in results
    ]
    return json.dumps({"sweep": str(folder), "exit_code": exit_code, "cells": cells})


def write_sweep(name: str, results: Sequence[CellResult], folder: Path) -> None:
    """Write the tables of a sweep's cells; readers find the old ones or the new ones."""
    write_whole(folder / "sweep.csv", sweep_frame(results).to_csv(index=False).encode())
    write_whole(folder / "sweep.md", sweep_markdown(name, results).encode())


def sweep_markdown(name: str, results: Sequence[CellResult]) -> str:
    """What the cells differ in and the columns of a run's table; then what is not complete."""
    measured = [result.run for result in results if result.run and result.arms]
    axes = [*results[0].cell.settings]
    if any(result.cell.repeat > 1 for result in results):
        axes.append("repeat")
    rows = []
    for result in results:
        known = {**result.cell.settings, "repeat": result.cell.repeat}
        at = [NOTHING if known[axis] is None else str(known[axis]) for axis in axes]
        rows += [([*at, label], result.arms[arm]) for arm, label in labels_of(result.arms).items()]
    blocks = [
        f"Sweep {name}: {len(results)} cells, {_counted(result.status for result in results)}.",
        *dict.fromkeys(map(short_caption, measured)),
        arms_table(rows, [*axes, "arm"]).markdown(right=len(axes) + 1, plain=True),
        *(f"{r.cell.name}: {r.status}: {r.reason}" for r in results if not r.complete),
        *warnings_of(measured),
    ]
    return "\n\n".join(blocks) + "\n"


def sweep_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    """A row for each cell and arm, one for a cell that has none.

    The cell, its values of the grid as ``grid_kv_blocks``, its status, then the arm and all numbers
    of its summary; empty where there is none.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        head = {
            "cell": result.cell.name,
            **{f"grid_{name}": value for name, value in result.cell.settings.items()},
            "repeat": result.cell.repeat,
            "status": result.status,
            "reason": result.reason,
        }
        measured = result.run if result.arms else None
        arms = arms_frame(measured).to_dict("records") if measured else [{"arm": None}]
        rows += [{**head, **{str(name): value for name, value in arm.items()}} for arm in arms]
    return pd.DataFrame(rows).convert_dtypes()
