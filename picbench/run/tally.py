"""Running totals of one arm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from picbench.arms.messages import GroupResult, ServerCounts
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import Snapshot
from picbench.output.sample_row import SampleRow
from picbench.output.stalls import StepSeconds, step_seconds


@dataclass(slots=True)
class Tally:
    """Rows, busy seconds and the block ledger of one arm, round after round.

    `busy` counts clean rounds only, as do timings. The ledger's clock stops while other arms
    compute, so that averages over time are averages over the arm's own busy time. `moved` are
    bytes (loaded, stored) by tier, `step_times` the sum over rounds, `compiled` how often each
    kernel was compiled, and `evicted` how many blocks of `chunk` and `prefix` KV lost it.
    `steps` has the times of steps, batch by batch, and `counts` what a server elsewhere counted.
    """

    rows: list[SampleRow] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    busy: float = 0.0
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    steps: list[StepSeconds] = field(default_factory=list)
    counts: list[ServerCounts | None] = field(default_factory=list)
    _clock: float = 0.0

    def add(self, rows: Sequence[SampleRow], result: GroupResult) -> None:
        """Add a round."""
        self.rows.extend(rows)
        known = len(self.snapshots)
        self.snapshots.extend(
            replace(snapshot, step=known + number, time=self._clock + snapshot.time)
            for number, snapshot in enumerate(result.snapshots)
        )
        for tier, (loaded, stored) in result.moved.items():
            before = self.moved.get(tier, (0, 0))
            self.moved[tier] = (before[0] + loaded, before[1] + stored)
        self.step_times += result.step_times
        self.compiled.update(result.compiled)
        self.evicted.update(result.evicted)
        self.steps.append(step_seconds(result.snapshots))
        self.counts.append(result.counted)
        self._clock += result.busy
        if result.clean:
            self.busy += result.busy

    @property
    def counted(self) -> ServerCounts | None:
        """What a server elsewhere counted in all rounds; None unless it did so in each."""
        known = [counts for counts in self.counts if counts is not None]
        return sum(known[1:], known[0]) if known and len(known) == len(self.counts) else None

    @property
    def failed(self) -> int:
        """Requests without a result."""
        return sum(row.error is not None for row in self.rows)
