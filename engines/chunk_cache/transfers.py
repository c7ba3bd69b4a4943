"""Transfers of one engine step: commands to the workers' tiers, and the workers' results."""

from dataclasses import dataclass, field, fields
from typing import Self

from picbench.engines.planning.keys import Key


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """Store a chunk in the tiers; `blocks` hold all of its pages, in order."""

    key: Key
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """Load some `pages` (by index) of a chunk of `size` pages into as many `blocks`."""

    key: Key
    size: int
    pages: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Load blocks of a request from the tiers; the request waits for all of its chunks."""

    request_id: str
    chunks: tuple[ChunkLoad, ...]


@dataclass(frozen=True, slots=True)
class CopyCommand:
    """Copy a block of the KV pool into another one, which is a request's own."""

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """Delete chunks from all tiers, once what is on its way has arrived; answered by `number`.

    Free `blocks` are filled with zeros.
    """

    number: int
    keys: tuple[Key, ...] = ()
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class TransferCommands:
    """Commands of one step. Copies and stores read blocks as they were before the step.

    `lookups` asks whether a tier has a chunk; `clear` deletes what this engine stored.
    """

    lookups: list[Key] = field(default_factory=list)
    stores: list[StoreCommand] = field(default_factory=list)
    loads: list[LoadCommand] = field(default_factory=list)
    copies: list[CopyCommand] = field(default_factory=list)
    erasures: list[Erasure] = field(default_factory=list)
    clear: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def withdraw(self, request_id: str) -> None:
        """Remove the loads and copies of a request."""
        self.loads = [load for load in self.loads if load.request_id != request_id]
        self.copies = [copy for copy in self.copies if copy.request_id != request_id]

    def take(self) -> "TransferCommands":
        """Return the collected commands, and start empty."""
        taken = TransferCommands(**{f.name: getattr(self, f.name) for f in fields(self)})
        for f in fields(self):
            setattr(self, f.name, False if f.name == "clear" else [])
        return taken


#: Tiers that take more than this share of steps are said to slow them.
SLOW_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of steps that computed something: of all of them, and what tiers took of that.

    `tiers`: steps stalled for chunk KV on its way between pool and tiers, not for copies in the
    pool.
    """

    steps: float = 0.0
    tiers: float = 0.0

    @property
    def share(self) -> float:
        """The tiers' share of the steps, from 0 to 1."""
        return self.tiers / self.steps if self.steps else 0.0

    @property
    def slow(self) -> bool:
        """Whether tiers slow the steps."""
        return self.share > SLOW_SHARE

    def __add__(self, other: Self) -> "StepTimes":
        return StepTimes(self.steps + other.steps, self.tiers + other.tiers)

    def __sub__(self, other: Self) -> "StepTimes":
        return StepTimes(self.steps - other.steps, self.tiers - other.tiers)

    def slowest(self, other: Self) -> "StepTimes":
        """The times of two ranks that step together."""
        return StepTimes(max(self.steps, other.steps), max(self.tiers, other.tiers))


@dataclass(slots=True)
class TransferResults:
    """Results of one step.

    `present` and `absent` answer lookups. `stored` chunks are in a tier, `refused` ones in none;
    `lost` ones were missing or broken when they were loaded. `served` says by request from which
    tier each of its chunks was loaded. `pending` counts transfers and lookups under way. `faults`
    are the requests whose commands raised an exception, with the reason. `times` are those of steps
    since the results before. `erased` says by number of an erasure which tiers
    failed.
    """

    present: set[Key] = field(default_factory=set)
    absent: set[Key] = field(default_factory=set)
    stored: set[Key] = field(default_factory=set)
    refused: set[Key] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)
    served: dict[str, dict[Key, str]] = field(default_factory=dict)
    pending: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    erased: dict[int, list[str]] = field(default_factory=dict)

    def as_failed(self) -> "TransferResults":
        """The results as if the tiers had nothing and took nothing."""
        return TransferResults(
            absent=self.present | self.absent,
            refused=self.stored | self.refused,
            lost=self.lost,
            pending=self.pending,
            times=self.times,
            erased=self.erased,
        )

    def merge(self, other: Self) -> "TransferResults":
        """Combine the results of two ranks: a chunk is in the tiers only if both ranks have it."""
        absent = self.absent | other.absent
        refused = self.refused | other.refused
        return TransferResults(
            present=(self.present | other.present) - absent,
            absent=absent,
            stored=(self.stored | other.stored) - refused,
            refused=refused,
            lost=self.lost | other.lost,
            served=self.served,
            pending=max(self.pending, other.pending),
            faults=self.faults | other.faults,
            times=self.times.slowest(other.times),
            erased=self.erased | other.erased,
        )
