"""What algorithms score row by row: which are compared on which model, and what was measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from picbench.engines.algorithms import Algorithm, Registry
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.errors import ConfigError, DataError, closest
from picbench.files import write_json
from picbench.statistics.intervals import difference_interval, ratio_interval, ratio_of_sums
from picbench.workloads.sample import Sample

#: Recompute nothing of a chunk's KV but what the algorithm says; all others are compared with it.
FULL = "full"

#: MEPIC with one block a chunk: what an arm of ours may link at most to count as cheap.
MEPIC = "mepic"

#: Published algorithms, and options of theirs.
PUBLISHED = (
    FULL,
    "prefix",
    "naive",
    *(f"epic:k={k}" for k in (0, 1, 2, 4, 8, 16, 32, 64)),
    "epic:k=16:bos=chunk",
    *(f"cacheblend:r={r}" for r in (0.05, 0.15, 0.3, 0.5)),
    "cacheblend:r=0.15:select=first",
    MEPIC,
    "mepic:blocks=2",
    "mepic:pad=paper",
    "minipic",
    "block-attention",
    "prompt-cache",
    "kvlink:n=5",
)

#: picbench's own: chunks that know their documents, the prompt's first text, or the question. As
#: all arms here they are canonical specs.
OWN = (
    "naive:context=document",
    "naive:anchored=on",
    "naive:anchored=on:context=document",
    "epic:k=16:context=document",
    "mepic:context=document",
    "mepic:anchored=on",
    "mepic:anchored=on:context=document",
    "mepic:select=question",
    "mepic:anchored=on:context=document:select=question",
)

_WITH_TUNED = (FULL, "naive", MEPIC, "naive:context=document", "mepic:anchored=on:context=document")

#: Arms by model. The tuned models serve what they were tuned for, and a few arms beside it.
ARMS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "testbed": (*PUBLISHED, *OWN),
        "testbed:block": (*_WITH_TUNED, "block-attention"),
        "testbed:link": (*_WITH_TUNED, "kvlink:n=5"),
    }
)

#: Arms where the retriever left the lead passage out, on the testbed model.
DROP_ARMS = (
    FULL,
    "naive",
    MEPIC,
    "naive:context=document",
    "mepic:context=document",
    "naive:anchored=on:context=document",
    "mepic:anchored=on:context=document",
)

#: The data sets that have such passages.
DROP_DATASETS = ("musique", "2wikimqa", "hotpotqa")


def arms_of(model: str, *, drop: bool = False, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The canonical specs of a model's arms, or of those in `only`, among them always `full`.

    Raises ConfigError for a model that has none, and for an algorithm that does not exist.
    """
    if only:
        registry = Registry()
        return tuple(dict.fromkeys((FULL, *(registry.parse(spec).spec for spec in only))))
    if model not in ARMS_OF:
        raise ConfigError(f"`model` {model}: not a testbed", hint=closest(model, ARMS_OF))
    return DROP_ARMS if drop else ARMS_OF[model]


def planned_links(sample: Sample, algorithm: Algorithm) -> int:
    """Tokens that a request computes besides its text, if no computed block is found in the cache.

    They are recomputed in chunks, or added to the prompt: link tokens, BOS, visible pads.
    """
    given = [
        Segment(s.tokens, chunk=s.kind == "chunk", context=s.context)
        for s in sample.segments
        if s.tokens
    ]
    # Which tokens are added makes no difference to their number.
    layout = LayoutConfig(
        BLOCK_SIZE, pad=algorithm.pads, bos_token=0, documents=algorithm.documents
    )
    plan = lay_out(algorithm.arrange(given, layout), algorithm.plan_chunk, layout)
    return sum(
        kind is SlotKind.LINKED or (kind is SlotKind.PAD and position != GAP)
        for page in plan.computed
        for kind, position in zip(page.kinds, page.positions, strict=True)
    )


@dataclass(frozen=True, slots=True)
class RowInterval:
    """An estimate and its interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        """With signs, for differences."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def difference_of(first: Sequence[float], second: Sequence[float]) -> RowInterval:
    """Mean of `first` less that of `second`, with its BCa interval. Needs two rows."""
    found = difference_interval(first, second)
    return RowInterval(float(np.subtract(first, second).mean()), found.low, found.high)


def ratio_of(
    first: Sequence[float], second: Sequence[float], resamples: int | None = None
) -> RowInterval | None:
    """Mean of `first` over that of `second`, above 0, with its BCa interval. Needs two rows.

    None where a resample has nothing to divide by.
    """
    found = ratio_interval(first, second, resamples=resamples)
    return RowInterval(ratio_of_sums(first, second).mean, found.low, found.high) if found else None


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a data set; with `drop`, prompts lack the passages before those that answer.

    Of the data set's rows, the `first` ones are left out.
    """

    model: str
    dataset: str
    drop: bool = False
    first: int = 0

    @property
    def name(self) -> str:
        """The name of the case's file, without its suffix."""
        drop, first = "-drop" * self.drop, f"-from-{self.first}" if self.first else ""
        return f"{file_name(self.model)}-{self.dataset}{drop}{first}"


def file_name(model: str) -> str:
    """A model's name in names of files."""
    return model.replace(":", "-").replace("/", "--")


@dataclass(slots=True)
class ArmRows:
    """What an arm did on each row, in the data set's order.

    `score` is from 0 to 1. `linked` is what the plan links (`planned_links`), `computed` what the
    engine computed of the prompt: tokens that the cache had from requests before are missing.
    """

    score: list[float] = field(default_factory=list)
    linked: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ScoredPart:
    """All arms on the first rows of a case. `prompt` and `chunk` are tokens of each row.

    `wanted` is how many rows there will be, `facts` say where it was measured.
    """

    case: Case
    wanted: int
    facts: Mapping[str, Any]
    arms: dict[str, ArmRows]
    prompt: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises DataError for another one."""
        try:
            found = json.loads(path.read_bytes())
            if (schema := found.pop("schema")) != SCHEMA:
                raise DataError(f"{path}: schema {schema}, not {SCHEMA}")
            found["facts"] = found.pop("provenance")
            return TypeAdapter(cls).validate_python(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: no scores of algorithms: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Write ``NAME.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        found = asdict(self)
        document = {"schema": SCHEMA, "provenance": found.pop("facts"), **found}
        write_json(folder / f"{self.case.name}.json", document, indent=None)

    @property
    def rows(self) -> int:
        """How many rows are done."""
        return len(self.prompt)

    def check_continues(self, other: "ScoredPart") -> None:
        """Raise ConfigError unless this part can be continued with the settings of `other`.

        Those may be of another GPU.
        """
        mine, others = (
            (part.wanted, list(part.arms), {**part.facts, "gpu": None, "driver": None})
            for part in (self, other)
        )
        if mine != others:
            raise ConfigError(
                f"`output`: {self.case.name}.json was measured with other settings",
                hint="remove it, or name another folder",
            )


def ran(facts: Mapping[str, Any]) -> str:
    """In which type scores were measured, and on what: the end of a sentence."""
    eager = ", eager" if facts["eager"] else ""
    where = "{gpu}, driver {driver}, vLLM {vllm}, torch {torch}, commit {commit}.".format_map(facts)
    return f"{facts['dtype']}{eager}; {where}"


def read_parts(folder: Path) -> list[ScoredPart]:
    """All parts in a folder, in the order of their names. Raises DataError if there are none."""
    found = [ScoredPart.read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(f"{folder}: no scores of algorithms", hint="measure them first")
    return found


@dataclass(frozen=True, slots=True)
class ArmScore:
    """An arm on a case: means over `rows`, two or more.

    `difference` is the score less that of full recompute on the same rows and the same model,
    `kept` the ratio of the two, None where that scores nothing, or might in other rows (a resample
    in which it does). `linked` and `computed` are tokens a request, `share` is `linked` over the
    tokens of chunks.
    """

    case: Case
    arm: str
    rows: int
    score: float
    difference: RowInterval
    kept: RowInterval | None
    linked: float
    share: float
    computed: float

    @classmethod
    def of(cls, part: ScoredPart, arm: str, resamples: int | None = None) -> Self:
        """An arm of a part; `resamples` are those that `kept` is from."""
        rows, full = part.arms[arm], part.arms[FULL].score
        linked = fmean(rows.linked)
        return cls(
            part.case,
            arm,
            part.rows,
            fmean(rows.score),
            difference_of(rows.score, full),
            ratio_of(rows.score, full, resamples) if any(full) else None,
            linked,
            linked / fmean(part.chunk),
            fmean(rows.computed),
        )
