"""The interface of a tier: a store of bytes by key that may lose them at any time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

import numpy as np

from picbench.engines.chunk_cache.tiers.spec import TierSpec

Key: TypeAlias = bytes
Buffer: TypeAlias = bytes | bytearray | memoryview

#: What is stored under a key: one buffer, or its parts, one after the other.
Payload: TypeAlias = Buffer | Sequence[Buffer]

#: Makes writable memory of exactly so many bytes; may raise MemoryError.
Allocate: TypeAlias = Callable[[int], memoryview]


def pageable(nbytes: int) -> memoryview:
    """Ordinary memory: the allocator for hosts that nothing reads by DMA."""
    return np.empty(nbytes, np.uint8).data


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds, and what it has done since it was opened.

    `objects` and `bytes` count what is there now, of all processes that share the tier; None where
    the store does not say. `capacity` is in bytes, None where the tier has no bound of its own.
    `evictions` and `refused` (puts that were not kept: full, or too large) count this process.
    """

    objects: int | None
    bytes: int | None
    capacity: int | None
    evictions: int = 0
    refused: int = 0


class Tier(ABC):
    """Bytes by key. Methods block, may be called from any thread, and take batches.

    Keys are content hashes, so two values under one key are equal and a value never goes stale.
    A tier may drop any value at any time. It raises (OSError or its client's error) when it cannot
    answer; a missing value is an answer. `GuardedTier` adds deadlines, checksums and counters.
    """

    #: The kind's name in specs, and what users read about it.
    kind: ClassVar[str]
    summary: ClassVar[str]
    notation: ClassVar[str]

    #: Whether calls only touch this process's memory, so that they cannot hang.
    immediate: ClassVar[bool] = False

    #: Names this tier in tables and warnings; holds no credentials.
    name: str

    @classmethod  # noqa: B027
    def check(cls, spec: TierSpec) -> None:
        """Raise ConfigError for a spec that the kind does not take, before anything is started.

        Opens and imports nothing. Kinds without it are checked when they are opened.
        """

    @classmethod
    @abstractmethod
    def open(cls, spec: TierSpec, allocate: Allocate) -> Self:
        """Open the tier of a spec; raises ConfigError for a spec that the kind does not take.

        A store that cannot be reached is no error: it may come back.
        """

    @abstractmethod
    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether a value is there, per key; does not count as use."""

    @abstractmethod
    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        """Keep values; False per item that was not kept: the tier is full, or the item too large.

        What is kept has been copied when this returns. A value that is there already is replaced.
        """

    @abstractmethod
    def get(self, keys: Sequence[Key]) -> list[Buffer | None]:
        """The values, None per key that is not there; counts as use.

        Values stay valid while the caller holds them, whatever the tier evicts, and must not be
        written to: a host tier returns views of its own memory.
        """

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> None:
        """Delete values; missing ones are no error."""

    @abstractmethod
    def usage(self) -> Usage:
        """What the tier holds."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; values in shared stores stay."""
