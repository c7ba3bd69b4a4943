"""What a sweep has to do: for each cell its state, requests, tokens, memory and time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.errors import ConfigError
from picbench.output.run_directory import MANIFEST
from picbench.output.run_reader import Run, read_run
from picbench.output.store.documents import FINAL
from picbench.output.store.overview import arms_of
from picbench.run.job import Job, prepare
from picbench.run.session import Services
from picbench.sweep.shared_workloads import SharedWorkloads
from picbench.sweep.sweep_cell import SweepCell

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
