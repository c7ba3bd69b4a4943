"""One arm of a run in columns: what comparisons need of it, and no more."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from picbench.errors import ConfigError
from picbench.output.run_reader import Run, check_rows
from picbench.output.sample_row import SampleRow
from picbench.output.summary import ArmSummary, computed_tokens

#: Times of a request in milliseconds, compared as ratios.
TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")

#: Counts of a request, compared exactly.
COUNTERS = (
    "prompt_tokens",
    "output_tokens",
    "computed_tokens",
    "reused_tokens",
    "compiled_tokens",
    "linked_tokens",
    "padded_slots",
    "chunk_blocks",
    "prefix_blocks",
    "copied_blocks",
    "tier_blocks",
)

#: Counts of a whole arm: blocks that requests held at most, blocks with KV in them at most, bytes
#: that tiers gave and got, requests without a result.
TOTALS = ("peak_blocks", "peak_resident_blocks", "loaded_bytes", "stored_bytes", "failed")

#: Characters that are kept of a hash: two of 10,000 prompts are alike in them once in 10^11 runs.
_HASH = 16


@dataclass(frozen=True, slots=True)
class MeasuredArm:
    """The answered requests of one arm, a value a request in every column.

    `samples` are unique: the answer to one in the second repeat is ``"name#2"``, a second answer
    in one repeat ``"name+1"``. Samples of one of `clusters` share documents. `rounds`, and the
    `places` of requests in the order of the run, begin anew in each of the `repeats`, which are
    numbered from 0: requests of one place are the same request. A score is None where
    there is nothing to score, a time where none was measured. `prompts` and `outputs` are the
    beginnings of SHA-256 hashes. `totals` lacks what the run does not say.
    """

    name: str
    samples: tuple[str, ...]
    clusters: tuple[str, ...]
    rounds: tuple[int, ...]
    places: tuple[int, ...]
    repeats: tuple[int, ...]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    scores: tuple[float | None, ...]
    times: Mapping[str, tuple[float | None, ...]]
    counters: Mapping[str, tuple[int, ...]]
    totals: Mapping[str, float]


def measured_arms(run: Run) -> dict[str, MeasuredArm]:
    """The arms of a run by name, in its order.

    Raises ConfigError for a run without a row, InvalidRun for one that lacks some of its rows.
    """
    rows: dict[str, list[SampleRow]] = {}
    for row in run.rows:
        rows.setdefault(row.arm, []).append(row)
    if not rows:
        raise ConfigError(f"{run.path}: has no rows", hint="run it again")
    check_rows(run)
    summary = run.summary
    return {name: _measure(name, own, summary.get(name)) for name, own in rows.items()}


def _measure(name: str, rows: Sequence[SampleRow], summary: ArmSummary | None) -> MeasuredArm:
    answered = [row for row in rows if row.error is None]
    samples = tuple(sample_labels(answered))
    firsts = _first_rounds(rows)
    places = (place for place, row in placed(rows) if row.error is None)
    failed = {(row.sample, row.repeat) for row in rows if row.error is not None}
    failed -= {(row.sample, row.repeat) for row in answered}  # Those that went well when repeated.
    return MeasuredArm(
        name=name,
        samples=samples,
        clusters=tuple(row.cluster or row.sample for row in answered),
        rounds=tuple(row.round - firsts[row.repeat] for row in answered),
        places=tuple(places),
        repeats=tuple(row.repeat for row in answered),
        prompts=tuple(row.prompt_sha256[:_HASH] for row in answered),
        outputs=tuple((row.output_sha256 or "")[:_HASH] for row in answered),
        scores=tuple(row.score for row in answered),
        times={t: tuple(getattr(r, t) if r.timed else None for r in answered) for t in TIMES},
        counters=_counters(answered),
        totals=_totals(summary) | {"failed": len(failed)},
    )


def _first_rounds(rows: Iterable[SampleRow]) -> dict[int, int]:
    """The number of each repeat's first round."""
    firsts: dict[int, int] = {}
    for row in rows:
        firsts[row.repeat] = min(row.round, firsts.get(row.repeat, row.round))
    return firsts


def placed(rows: Iterable[SampleRow]) -> Iterator[tuple[int, SampleRow]]:
    """Rows of one arm with their places in their repeats."""
    sent = Counter[int]()
    for row in rows:
        yield sent[row.repeat], row
        sent[row.repeat] += 1


def sample_labels(answered: Iterable[SampleRow]) -> Iterator[str]:
    """What comparisons call the answered rows of one arm; see `MeasuredArm`."""
    seen = Counter[str]()
    for row in answered:
        label = row.sample if not row.repeat else f"{row.sample}#{row.repeat + 1}"
        yield f"{label}+{seen[label]}" if seen[label] else label
        seen[label] += 1


def _counters(rows: Sequence[SampleRow]) -> dict[str, tuple[int, ...]]:
    """Counts by name; without those that a server elsewhere does not give."""
    found = {name: tuple(map(_COUNT[name], rows)) for name in COUNTERS}
    return {name: counts for name, counts in found.items() if None not in counts}


#: None where a server elsewhere does not say.
_COUNT: Mapping[str, Callable[[SampleRow], Any]] = {
    "prompt_tokens": attrgetter("tokens.prompt"),
    "output_tokens": attrgetter("output_tokens"),
    "computed_tokens": lambda row: computed_tokens(row.tokens),
    "reused_tokens": attrgetter("tokens.reused"),
    "compiled_tokens": attrgetter("tokens.compiled"),
    "linked_tokens": attrgetter("tokens.linked"),
    "padded_slots": attrgetter("tokens.padded"),
    "chunk_blocks": attrgetter("hits.chunk"),
    "prefix_blocks": attrgetter("hits.prefix"),
    "copied_blocks": attrgetter("hits.copied"),
    "tier_blocks": lambda row: sum(row.hits.tiers.values()),
}


def _totals(summary: ArmSummary | None) -> dict[str, float]:
    if summary is None:
        return {}
    pool = {
        "peak_blocks": summary.blocks.peak_referenced,
        "peak_resident_blocks": summary.blocks.peak_resident,
    }
    moved = {
        "loaded_bytes": sum(tier.loaded_bytes for tier in summary.moved.values()),
        "stored_bytes": sum(tier.stored_bytes for tier in summary.moved.values()),
    }
    return (pool if summary.blocks.pool else {}) | moved
