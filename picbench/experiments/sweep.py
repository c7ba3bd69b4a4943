"""A sweep: every combination of a grid's settings, each a run of its own with its own engines."""

import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from picbench.engines.chunk_cache.tiers.notation import without_credentials
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.errors import ConfigError, PicBenchError, closest
from picbench.figures.run import write_run_files
from picbench.files import reading, write_json, write_whole
from picbench.run.arm import all_arms
from picbench.run.job import Job, prepare
from picbench.run.result import arms_of, headline, print_all
from picbench.run.schedule import Progress, minutes
from picbench.run.server import check_engine
from picbench.run.session import Services, execute
from picbench.run.workload import Workload
from picbench.settings import RunConfig, parse_config
from picbench.store import provenance
from picbench.store.reader import Run, read_run
from picbench.store.summary import ArmSummary, labels_of
from picbench.store.writer import FINAL, MANIFEST, check_free
from picbench.tables.run import arms_frame, arms_table, short_caption, warnings_of
from picbench.tables.table import NOTHING, Column, Shown, Table, Value

#: What a sweep's folder is recognised by, with its cells and their settings.
SWEEP = "sweep.json"

#: Settings that hold for all cells, and that no file has.
_OF_COMMAND = ("output", "offline")

#: Settings that are flags which can be repeated: a value is one of them, or a list.
_SEVERAL = ("algo", "arm")

#: Settings that no workload depends on: of engines, of the order of requests, of what is written.
UNREAD = frozenset(
    {
        *("cache", "compile_order", "concurrency", "device", "dtype", "eager"),
        *("keys_without_rope", "kv_blocks", "max_running", "on_pressure", "output", "repeats"),
        *("self_check", "shared_decode", "slo", "tensor_parallel", "tiers"),
    }
)


class SweepFile(BaseModel):
    """A sweep: settings of `RunConfig` that all cells have, and the values of those that differ.

    Every combination of the grid's values is a cell, and each cell is measured `repeats` times.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field("", pattern=r"^[\w.-]*$")
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    repeats: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _known(self) -> "SweepFile":
        """Check names and values. Raises ConfigError, which pydantic lets pass."""
        known = [name for name in RunConfig.model_fields if name not in _OF_COMMAND]
        named = [(f"base.{name}", name) for name in self.base]
        for place, name in [*named, *((f"grid.{name}", name) for name in self.grid)]:
            if name in _OF_COMMAND:
                raise ConfigError(f"{place}: holds for all cells", hint=f"give it as `{name}`")
            if name not in known:
                raise ConfigError(f"{place}: no such setting", hint=closest(name, known))
        if "algo" not in self.base.keys() | self.grid.keys():
            raise ConfigError("no algo in base or grid", hint="add base: {algo: [full, mepic]}")
        for name, values in self.grid.items():
            if name in self.base:
                raise ConfigError(f"grid.{name}: is in base, too", hint="remove one of them")
            texts = [json.dumps(_setting(name, value), default=str) for value in values]
            for number, text in enumerate(texts):
                if (first := texts.index(text)) < number:
                    message = f"grid.{name}[{number}]: is {text}, as grid.{name}[{first}] is"
                    raise ConfigError(message, hint="repeats: 2 measures each cell twice")
        return self


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
    """Read a file, whose name is the sweep's if it has none. Raises ConfigError with the place."""
    example = "a sweep has base: {dataset: musique} and grid: {algo: [mepic, naive]}"
    with reading(str(path), missing="name a YAML file", wrong=example, lower=True):
        sweep = SweepFile.model_validate(_mapping(path, SweepFile.model_fields, example))
    return sweep if sweep.name else sweep.model_copy(update={"name": path.stem})


def read_config(path: Path) -> dict[str, Any]:
    """The settings of one run from a file. Raises ConfigError with its name."""
    example = "settings of a run are like dataset: musique and algo: [mepic, naive]"
    with reading(str(path), missing="name a YAML file", wrong=example, lower=True):
        found = _mapping(path, RunConfig.model_fields, example)
    return {name: _setting(name, value) for name, value in found.items()}


def _mapping(path: Path, known: Iterable[str], example: str) -> dict[str, Any]:
    found = yaml.load(path.read_text(encoding="utf-8"), Loader=_OnceLoader)
    if not isinstance(found, dict):
        raise ConfigError("no mapping", hint=example)
    for name in found.keys() - {*known}:
        raise ConfigError(f"{name}: no such field", hint=closest(str(name), known))
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Where in the file `path` each setting of a cell is, such as ``grid.algo[2]``."""

    path: Path
    settings: Mapping[str, str]

    def put_into(self, text: str) -> str:
        """A message with places instead of settings in backticks, where they are in the file."""

        def place(found: re.Match[str]) -> str:
            name, value = found.groups()
            if name not in self.settings:
                return found[0]
            return f"{self.settings[name]}: {value[1:]}" if value else self.settings[name]

        return re.sub(r"`([a-z][a-z0-9_]*)(=[^`]*)?`", place, text)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put file and places into the ConfigErrors that a cell's settings raise."""
        try:
            yield
        except ConfigError as error:
            hint = self.put_into(error.hint)
            raise ConfigError(f"{self.path}: {self.put_into(error.message)}", hint=hint) from error


@dataclass(slots=True)
class SweepCell:
    """One combination of a grid's values, to be measured for the `repeat`-th time, from 1.

    `settings` has these values as they may be shown, `config` all settings of the run. `plan` adds
    what there is to do: requests and tokens (see `tokens_of_arm`) of each arm, over all repeats;
    the pool of each arm, in blocks, and the bytes of all pools (see `pool_bytes`). `run` is what
    the directory has, `failure` an error of this call.
    """

    name: str
    settings: Mapping[str, Any]
    repeat: int
    config: RunConfig
    places: Places
    arms: tuple[str, ...] = ()
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    pool: int = 0
    pool_bytes: int | None = None
    run: Run | None = None
    failure: str | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.config.output or "")

    def read(self, failure: str | None = None) -> None:
        """Read the directory as it is now, after a failure if there was one."""
        self.run = read_run(self.path) if (self.path / MANIFEST).exists() else None
        self.failure = failure

    def plan(self, services: Services) -> None:
        """Find out what there is to do. Raises ConfigError for a cell that cannot run here now."""
        with self.places.named():
            job = prepare(self.config, services.load, services.memory)
            self.read()
            for arm in job.arms:
                if arm.endpoint is None and self.status not in FINAL:
                    check_engine(job.engine(arm))
            self.pool_bytes = pool_bytes(job)
        self.arms, self.pool = tuple(arm.name for arm in job.arms), job.sizes.pool
        self.requests = self.config.repeats * len(job.workload.samples)
        self.prompt_tokens, self.output_tokens = tokens_of_arm(job)

    @property
    def status(self) -> str:
        """That of the run; ``failed`` or ``missing`` where there is none."""
        if self.run is None:
            return "missing" if self.failure is None else "failed"
        return str(self.run.manifest["status"])

    @property
    def reason(self) -> str | None:
        """Why the cell is not complete, as far as that is known."""
        if self.run is None:
            return self.failure
        if self.status == "partial":
            arms = self.run.summary.values()
            failed, total = sum(arm.failed for arm in arms), sum(arm.requests for arm in arms)
            return f"{failed} of {total} requests failed"
        return self.failure or self.run.manifest["reason"]

    @property
    def measured(self) -> Mapping[str, ArmSummary]:
        """The summaries of what was measured."""
        return arms_of(self.run) if self.run else {}

    @property
    def left(self) -> dict[str, int]:
        """Prompt tokens that are left to measure, by arm; none of a cell that has ended."""
        if self.status in FINAL:
            return {}
        done = {arm: found.tokens.prompt for arm, found in self.measured.items()}
        return {arm: max(0, self.prompt_tokens - done.get(arm, 0)) for arm in self.arms}


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
            all_arms(config)
            shown = {name: values[name] for name in own}
            for name, value in shown.items():
                if name in _SEVERAL:
                    shown[name] = ",".join(value)
                elif name == "tiers" and value:
                    shown[name] = without_credentials(value)
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


def load_once(load: Callable[[RunConfig], Workload]) -> Callable[[RunConfig], Workload]:
    """Load each workload once, as far as it is one of the last 16."""

    @lru_cache(maxsize=16)
    def kept(settings: str) -> Workload:
        return load(RunConfig.model_validate_json(settings))

    return lambda config: kept(config.model_dump_json(exclude=set(UNREAD)))


def tokens_of_arm(job: Job) -> tuple[int, int]:
    """Prompt tokens of each arm, and output tokens at most, over all repeats."""
    samples, times = job.workload.samples, job.config.repeats
    return times * sum(s.prompt_tokens for s in samples), times * sum(s.max_tokens for s in samples)


def pool_bytes(job: Job) -> int | None:
    """Bytes of the KV pools of all engines here; None if the model does not tell them."""
    engines = job.engines.values()
    try:
        model = read_model_config(str(job.workload.model.path)) if engines else {}
    except ConfigError:
        return None
    footprints = [GpuFootprint.of(engine, model) for engine in engines]
    known = [found.block for found in footprints if found is not None]
    ranks = job.config.tensor_parallel
    return job.sizes.pool * sum(known) * ranks if len(known) == len(footprints) else None


class TimeEstimate:
    """Seconds that arms will take, from what they took in `cells` cells or runs.

    An arm takes its mean busy seconds for each prompt token; one that was never measured takes the
    mean of all arms. Starts of engines are not in it.
    """

    def __init__(self, measured: Iterable[Mapping[str, ArmSummary]]) -> None:
        self.cells = 0
        self._tokens = Counter[str]()
        self._seconds: dict[str, float] = defaultdict(float)
        for arms in measured:
            known = {name: arm for name, arm in arms.items() if arm.tokens.prompt and arm.busy_s}
            self.cells += bool(known)
            for name, arm in known.items():
                self._tokens[name] += arm.tokens.prompt
                self._seconds[name] += arm.busy_s

    def seconds(self, tokens: Mapping[str, int]) -> float | None:
        """For prompt tokens by arm; None where nothing was measured."""
        if not self.cells:
            return None
        mean = sum(self._seconds.values()) / self._tokens.total()
        speeds = {arm: self._seconds[arm] / count for arm, count in self._tokens.items()}
        return sum(count * speeds.get(arm, mean) for arm, count in tokens.items())


def estimate_time(job: Job, runs: Path) -> tuple[float | None, int]:
    """Seconds of all arms together, and of how many runs below `runs` that is known.

    Runs are like the job in model, settings and hardware; the latest 20 count. None without one.
    """
    found = TimeEstimate(itertools.islice(_alike(job, runs), 20))
    return found.seconds({arm.name: tokens_of_arm(job)[0] for arm in job.arms}), found.cells


def _alike(job: Job, folder: Path) -> Iterator[Mapping[str, ArmSummary]]:
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
                yield arms_of(run)
        except (PicBenchError, KeyError):  # A run that cannot be read tells nothing.
            continue


def print_sweep_plan(cells: Sequence[SweepCell], stream: TextIO) -> None:
    """The cells, what there is of them, and what is left to do; what the columns mean."""
    estimate = TimeEstimate(cell.measured for cell in cells)
    rows: list[list[Value]] = []
    for cell in cells:
        arms, seconds = len(cell.arms), estimate.seconds(cell.left)
        fate = ": will be resumed" if cell.run else ""
        fate = cell.status + (": kept" if cell.status in FINAL else fate)
        pools = None if cell.pool_bytes is None else cell.pool_bytes / 2**20
        left = None if seconds is None else Shown(minutes(seconds), seconds)
        tokens = (cell.prompt_tokens * arms, cell.output_tokens * arms)
        requests = f"{cell.requests:,} x {arms} arms"
        rows.append([cell.name, fate, requests, *tokens, cell.pool, pools, left])
    head = ["cell", "state", "requests", "prompt\ntokens", "output\ntokens", "KV blocks"]
    head += ["KV pools\nMiB", "time left\nmin:s"]
    asked = sum(cell.requests * len(cell.left) for cell in cells)
    tokens_left = sum(sum(cell.left.values()) for cell in cells)
    time = "not known before a cell is measured."
    if estimate.cells:
        counted = f"{estimate.cells} measured {'cell' if estimate.cells == 1 else 'cells'}"
        total = minutes(sum(estimate.seconds(cell.left) or 0.0 for cell in cells))
        time = (
            f"{total} in all, by each arm's busy seconds a prompt token in {counted}; starts of "
            "engines are not in it."
        )
    print_all(
        stream,
        "dry run: no engine was started, nothing was written",
        Table("Cells", [*map(Column, head)], rows),
        f"{len(cells)} cells: {_counted(str(row[1]) for row in rows)}; those to run have "
        f"{asked:,} requests and {tokens_left:,} prompt tokens left",
        "requests, tokens (output: at most), KV pools: of all arms of a cell.",
        f"time left: {time}",
    )


def _counted(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def check_folder(folder: Path) -> None:
    """ConfigError unless the folder is absent below another, empty, or a sweep's."""
    if not (folder / SWEEP).is_file():
        check_free(folder, "a sweep's")


def open_sweep(name: str, cells: Sequence[SweepCell], folder: Path) -> None:
    """Make the folder of a sweep and say in it what its cells are."""
    settings = {cell.name: {**cell.settings, "repeat": cell.repeat} for cell in cells}
    write_json(folder / SWEEP, {"name": name, "cells": settings})


def measure_cell(config: RunConfig, services: Services, progress: Progress) -> Iterator[str]:
    """Run a cell, and make its tables and figures; a line for each that cannot be made."""
    job = prepare(config, services.load, services.memory)
    execute(job, services.launch, progress)
    yield from (services.files or write_run_files)(job.output)


def run_sweep(
    cells: Sequence[SweepCell],
    services: Services,
    display: Callable[[int], Progress],
    say: Callable[[str], None],
) -> Iterator[SweepCell]:
    """Run the cells that have not ended, and yield every cell as it is then.

    `display` shows the progress of so many requests, `say` prints a line. A cell that fails does
    not stop the others. Whatever else stops the sweep, the cell under way keeps its results.
    """
    for number, cell in enumerate(cells, 1):
        failure = None
        try:
            if cell.status not in FINAL:
                progress = display(cell.requests * len(cell.arms))
                progress.say(f"cell {number} of {len(cells)}: {cell.name}")
                for line in measure_cell(cell.config, services, progress):
                    say(f"{cell.name}: {line}")
        except PicBenchError as error:
            failure = " ".join(cell.places.put_into(str(error)).split())
        finally:
            cell.read(failure)
        if cell.status != "complete":
            say(f"{cell.name}: {cell.status}: {cell.reason}")
        yield cell


def sweep_line(folder: Path, cells: Sequence[SweepCell], exit_code: int) -> str:
    """One line of JSON about a sweep whose command ends with `exit_code`; see `status_line`."""
    found = [
        {
            "cell": cell.name,
            "run": str(cell.path) if cell.run else None,
            "status": cell.status,
            "reason": cell.reason,
            "arms": {name: headline(arm) for name, arm in cell.measured.items()},
        }
        for cell in cells
    ]
    return json.dumps({"sweep": str(folder), "exit_code": exit_code, "cells": found})


def write_sweep(name: str, cells: Sequence[SweepCell], folder: Path) -> None:
    """Write the tables of a sweep's cells; readers find the old ones or the new ones.

    ``sweep.csv`` has a row for each cell and arm, one for a cell that has none: the cell, its
    values of the grid as ``grid_kv_blocks``, its status, then the arm and all numbers of its
    summary; empty where there is none.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for cell in cells:
        about: dict[str, Any] = {"cell": cell.name}
        about |= {f"grid_{axis}": value for axis, value in cell.settings.items()}
        about |= {"repeat": cell.repeat, "status": cell.status, "reason": cell.reason}
        measured = cell.run if cell.measured else None
        arms = pd.DataFrame([{"arm": None}]) if measured is None else arms_frame(measured)
        rows += [about | {str(k): v for k, v in arm.items()} for arm in arms.to_dict("records")]
    table = pd.DataFrame(rows).convert_dtypes()
    write_whole(folder / "sweep.csv", table.to_csv(index=False).encode())
    write_whole(folder / "sweep.md", sweep_markdown(name, cells).encode())


def sweep_markdown(name: str, cells: Sequence[SweepCell]) -> str:
    """What the cells differ in and the columns of a run's table; then what is not complete."""
    measured = [cell.run for cell in cells if cell.run and cell.measured]
    axes = [*cells[0].settings, *(["repeat"] if any(cell.repeat > 1 for cell in cells) else [])]
    rows = []
    for cell in cells:
        known, arms = {**cell.settings, "repeat": cell.repeat}, cell.measured
        at = [NOTHING if known[axis] is None else str(known[axis]) for axis in axes]
        rows += [([*at, label], arms[arm]) for arm, label in labels_of(arms).items()]
    blocks = [
        f"Sweep {name}: {len(cells)} cells, {_counted(cell.status for cell in cells)}.",
        *dict.fromkeys(map(short_caption, measured)),
        arms_table(rows, [*axes, "arm"]).markdown(right=len(axes) + 1, plain=True),
        *(f"{c.name}: {c.status}: {c.reason}" for c in cells if c.status != "complete"),
        *warnings_of(measured),
    ]
    return "\n\n".join(blocks) + "\n"
