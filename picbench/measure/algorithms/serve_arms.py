"""Serve the rows of data sets by all algorithms in one engine, and keep score row by row.

Rows are served some at a time, each by every arm, in one batch in random order. After each of these
windows the part of the case is written, so that a measurement which was stopped goes on there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from picbench.engines.algorithms import Registry
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import FAILED, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.inputs.workload import Workload, load_workload
from picbench.measure.algorithms.arm_sets import DROP_DATASETS, arms_of
from picbench.measure.algorithms.planned_tokens import planned_links
from picbench.measure.algorithms.scored_part import Case, ScoredPart
from picbench.output import provenance
from picbench.run.config import parse_config
from picbench.run.protocol import to_request

#: Rows that are served together. With more, chunk KV is evicted before its last request.
WINDOW = 10


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What is served, and how.

    `rows` counts from the start of a data set, of which the `first` rows are left out.
    `kv_blocks` is the pool of the engine, `max_requests` how many run at a time. After `seconds`
    no window is begun. `algo` replaces the arms of the model, but for `full`. With `drop`, lead
    passages are left out of prompts.

    `name` is what files call the model, where that is not `model`. `data` says where the rows of a
    data set are, unless they are bundled. Prompts with more than `longest` tokens, their reply
    included, lose their middle; the engine has positions for twice as many, if the model has them.
    """

    model: str
    datasets: tuple[str, ...]
    rows: int = 200
    first: int = 0
    drop: bool = False
    algo: tuple[str, ...] = ()
    device: str = "cuda"
    dtype: str = "bfloat16"
    eager: bool = False
    kv_blocks: int = 16_384
    max_requests: int = 64
    seed: int = 0
    seconds: float = 0.0
    name: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    longest: int | None = None

    @property
    def cases(self) -> list[Case]:
        """The cases that are measured."""
        wanted = [d for d in self.datasets if not self.drop or d in DROP_DATASETS]
        name = self.name or self.model
        return [Case(name, dataset, self.drop, self.first) for dataset in wanted]

    def reading(self, dataset: str) -> dict[str, Any]:
        """Settings of a run that say how the rows of a data set are read."""
        found: dict[str, Any] = {"model": self.model, "context": self.longest}
        return found | ({"data": self.data[dataset]} if dataset in self.data else {})

    @property
    def arms(self) -> tuple[str, ...]:
        """The canonical specs of all arms."""
        return arms_of(self.model, drop=self.drop, only=self.algo)


def measure(settings: ServeSettings, commit: str | None, output: Path) -> bool:
    """Measure what is missing in the parts in `output`; whether all of them are complete.

    Raises ConfigError for parts of other settings, InvalidRun for a request that fails.
    """
    facts = provenance.facts(*provenance.ENGINE, device=settings.device, commit=commit)
    facts |= {"dtype": settings.dtype, "eager": settings.eager, "seed": settings.seed}
    facts |= {} if settings.longest is None else {"longest": settings.longest}
    workloads = [
        load_case(case, settings.arms, settings.rows, settings.reading(case.dataset))
        for case in settings.cases
    ]
    pairs = zip(settings.cases, workloads, strict=True)
    begun = [(_begun(case, load, settings, facts, output), load) for case, load in pairs]
    missing = [(part, load) for part, load in begun if part.rows < part.wanted]
    if not missing:
        return True
    end = time.monotonic() + settings.seconds if settings.seconds else None
    with Engine(engine_config(settings, workloads[0])) as engine:
        engine.warm_up()
        for part, load in missing:
            while part.rows < part.wanted and (end is None or time.monotonic() < end):
                _serve_window(engine, part, load, settings.seed)
                part.write(output)
                print(f"{part.case.name}: {part.rows} of {part.wanted} rows", flush=True)
            engine.reset()
    return all(part.rows == part.wanted for part, _ in missing)


def load_case(
    case: Case, arms: Sequence[str], rows: int, reading: Mapping[str, Any] | None = None
) -> Workload:
    """The first `rows` rows of a case; chunks have their documents. `reading`: see `ServeSettings`.

    Raises ConfigError if all of them are left out.
    """
    settings: dict[str, Any] = {"drop": "lead"} if case.drop else {}
    settings |= {"algo": tuple(arms), "dataset": case.dataset, "model": case.model, "limit": rows}
    found = load_workload(parse_config(settings | dict(reading or {})))
    if len(found.samples) <= case.first:
        raise ConfigError(f"`first` {case.first}: {case.dataset} has no row after that")
    return replace(found, samples=found.samples[case.first :])


def engine_config(settings: ServeSettings, workload: Workload) -> EngineConfig:
    """An engine for all arms: pads and documents may take as many positions as the model has."""
    positions = workload.model.context
    if settings.longest is not None:
        positions = min(positions or 2 * settings.longest, 2 * settings.longest)
    return EngineConfig(
        model=str(workload.model.path),
        device=settings.device,
        dtype=settings.dtype,
        eager=settings.eager,
        context=positions,
        kv_blocks=settings.kv_blocks,
        max_requests=settings.max_requests,
        tiers="",
    )


def _begun(
    case: Case, load: Workload, settings: ServeSettings, facts: Mapping[str, Any], output: Path
) -> ScoredPart:
    """The part as it was left, or a new one."""
    new = ScoredPart.begin(case, len(load.samples), {**facts, **_rows_of(load)}, settings.arms)
    path = output / f"{case.name}.json"
    if not path.exists():
        return new
    found = ScoredPart.read(path)
    found.check_continues(new)
    return found


def _rows_of(load: Workload) -> dict[str, Any]:
    """Facts about rows that are not bundled."""
    if load.synthetic:
        return {}
    origin = load.origin
    where = f"{origin.repository}@{origin.revision[:12]}" if origin else "files"
    return {"rows": where, "chat": load.chat, "cut": sum(s.truncated for s in load.samples)}


def _serve_window(engine: Engine, part: ScoredPart, load: Workload, seed: int) -> None:
    """Add the next rows to a part."""
    window = range(part.rows, min(part.rows + WINDOW, part.wanted))
    jobs = list(product(window, part.arms))
    Random(f"{seed} {part.case.name} {window.start}").shuffle(jobs)
    results = engine.generate([to_request(load.samples[row], arm) for row, arm in jobs])
    _keep(part, load, window, dict(zip(jobs, results, strict=True)))


def _keep(
    part: ScoredPart,
    load: Workload,
    window: range,
    results: Mapping[tuple[int, str], Result],
) -> None:
    registry = Registry()
    for row in window:
        sample = load.samples[row]
        for arm, rows in part.arms.items():
            result = results[row, arm]
            links = planned_links(sample, registry.parse(arm))
            what = f"{arm} on row {row} of {part.case.name}"
            check_served(result, what)
            if result.counts.linked > links:
                raise InvalidRun(f"{what} linked {result.counts.linked} tokens, its plan {links}")
            score = load.grader.score(result.text, sample.answers) or 0.0
            rows.score.append(round(score, 4))
            rows.linked.append(links)
            rows.computed.append(result.counts.prompt - (result.counts.reused or 0))
        part.prompt.append(sample.prompt_tokens)
        part.chunk.append(sum(len(chunk.tokens) for chunk in sample.chunks))


def check_served(result: Result, what: str) -> None:
    """Raise InvalidRun for a request that failed."""
    if result.finish_reason in (FAILED, "rejected"):
        raise InvalidRun(f"{what} failed: {result.error}")
