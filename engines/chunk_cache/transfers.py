"""What the scheduler asks of the workers' tiers in a step, and what the workers answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from picbench.engines.planning.keys import Key


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """Keep a chunk in the tiers: all of its pages, which lie in these blocks."""

    key: Key
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """Pages of a chunk of `size` pages, by index, and the blocks that they are loaded into."""

    key: Key
    size: int
    pages: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadCommand:
    """Fill blocks of a request from the tiers; it waits until all parts are there."""

    request_id: str
    parts: tuple[LoadedChunk, ...]


@dataclass(frozen=True, slots=True)
class CopyCommand:
    """Copy a block of the KV pool into another one."""

    source: int
    target: int


@dataclass(slots=True)
class TransferCommands:
    """One step's orders. Copies and stores read blocks as they were before the step.

    `lookups` asks where chunks are, `clear` empties the tiers that belong to this engine.
    """

    lookups: list[Key] = field(default_factory=list)
    stores: list[StoreCommand] = field(default_factory=list)
    loads: list[LoadCommand] = field(default_factory=list)
    copies: list[CopyCommand] = field(default_factory=list)
    clear: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def take(self) -> "TransferCommands":
        """What has been collected; collecting begins anew."""
        taken = TransferCommands(**{f.name: getattr(self, f.name) for f in fields(self)})
        for f in fields(self):
            setattr(self, f.name, False if f.name == "clear" else [])
        return taken


@dataclass(frozen=True, slots=True)
class TransferResults:
    """One step's answers.

    `present` and `absent` answer lookups. `stored` chunks are in a tier, `refused` ones in none;
    `lost` ones were found missing or broken when they were loaded. `served` gives the blocks that
    each tier loaded, by request. `pending` counts orders that are still under way.
    """

    present: frozenset[Key] = frozenset()
    absent: frozenset[Key] = frozenset()
    stored: frozenset[Key] = frozenset()
    refused: frozenset[Key] = frozenset()
    lost: frozenset[Key] = frozenset()
    served: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    pending: int = 0

    def merge(self, other: Self) -> "TransferResults":
        """What two ranks of one engine say together: there is only what both have."""
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
        )
