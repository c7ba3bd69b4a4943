"""What became of an arm's cache in a run that declares its state."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from picbench.engines.algorithms import Reuse
from picbench.output.sample_row import SampleRow
from picbench.output.summary import CacheSummary, DecayWindow, percentiles, ttft_ratio
from picbench.run.caches.declared_cache import CacheState, found, missed
from picbench.run.tally import Tally

#: Windows of a steady stream, so that each has a fifth of it: 40 requests or more.
WINDOWS = 5


def summarise_cache(
    state: CacheState | None, reuse: Reuse, tally: Tally, full: Sequence[SampleRow]
) -> CacheSummary | None:
    """The summary of an arm's cache, None without a declared state.

    `full` are the rows of the arm that the windows of a steady stream are compared with.
    """
    if state is None:
        return None
    answered = [row for row in tally.rows if row.error is None]
    return CacheSummary(
        expected_tokens=sum(row.expected_reuse or 0 for row in answered),
        found_tokens=sum(found(row) for row in answered),
        missed_requests=sum(missed(row, reuse) for row in answered) if state == "warm" else None,
        evicted_blocks=dict(tally.evicted),
        decay=_windows(tally.rows, full) if state == "steady" else (),
    )


def _windows(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> tuple[DecayWindow, ...]:
    """The windows of the stream, each over all repeats of it."""
    repeats = Counter(row.repeat for row in rows)
    streams = [[row for row in rows if row.repeat == repeat] for repeat in repeats]
    length = max(repeats.values(), default=0)
    ends = [length * number // WINDOWS for number in range(WINDOWS + 1)]
    return tuple(
        _window([row for stream in streams for row in stream[first:end]], first, full)
        for first, end in pairwise(ends)
    )


def _window(rows: Sequence[SampleRow], first: int, full: Sequence[SampleRow]) -> DecayWindow:
    answered = [row for row in rows if row.error is None]
    timed = [row for row in answered if row.timed]
    return DecayWindow(
        first=first,
        requests=len(rows),
        ttft_ms=percentiles(row.ttft_ms for row in timed),
        ttft_vs_full=ttft_ratio(timed, full),
        prompt_tokens=sum(row.tokens.prompt for row in answered),
        expected_tokens=sum(row.expected_reuse or 0 for row in answered),
        found_tokens=sum(found(row) for row in answered),
    )
