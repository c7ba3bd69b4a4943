"""The public view of an engine's chunk cache: what it holds, and warming, pinning and dropping."""

from collections.abc import Callable, Mapping, Sequence

from picbench.engines.chunk_cache.chunk_record import ChunkRecord
from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.tiers.guarded_tier import Counters
from picbench.engines.planning.keys import Key
from picbench.engines.planning.plan import Canonical
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.transfer.tier_client import TierClient
from picbench.errors import ConfigError

Chunks = Sequence[Chunk]


class ChunkCache:
    """Lists the chunks and tiers of one engine, and warms, pins and drops chunks.

    Chunks are identified by their content under the engine's default algorithm. What else they are
    compiled after counts only with algorithms that do so: `prefix`, the text before them
    (anchors), and their documents (``context=document``). `salt` is the tenant whose
    requests may use them.
    """

    def __init__(
        self,
        store: ChunkStore,
        tier_client: TierClient,
        serve: Callable[[Sequence[Request]], object],
        locate: Callable[[Request], Canonical | None],
        drain: Callable[[], None],
    ) -> None:
        self._store = store
        self._tier_client = tier_client
        self._serve = serve
        self._locate = locate
        self._drain = drain

    @property
    def chunks(self) -> list[ChunkRecord]:
        """The chunks in the KV pool, the most recently used one first."""
        return sorted(self._store, key=lambda chunk: -chunk.last_use)

    @property
    def tiers(self) -> Mapping[str, Counters]:
        """What each tier below the pool did since the engine started, by name, nearest first."""
        return self._tier_client.counters

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        """Bytes (loaded, stored) by tier since the engine started."""
        return {name: (done.bytes_read, done.bytes_written) for name, done in self.tiers.items()}

    def stored(self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None) -> int:
        """How many of the chunks a tier has, as far as is known, or need not (`recomputed`)."""
        keys = [self._key(chunk, prefix, salt) for chunk in chunks]
        return sum(key is None or self._store.is_remote(key) for key in keys)

    def recomputed(
        self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None
    ) -> int:
        """How many of the chunks the algorithm always recomputes as a whole."""
        return sum(self._key(chunk, prefix, salt) is None for chunk in chunks)

    def warm(
        self,
        chunks: Sequence[Chunk],
        prefix: Text | None = None,
        *,
        salt: str | None = None,
        pin: bool = False,
    ) -> None:
        """Compile or fetch chunks, and wait until the tiers have them.

        With `pin` they stay until they are unpinned, or a request comes that could never run
        otherwise.
        """
        self._serve([_request(chunk, prefix, salt) for chunk in chunks])
        self._drain()
        if pin:
            self.pin(chunks, prefix, salt)

    def digests(
        self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None
    ) -> list[bytes | None]:
        """A digest of each chunk's KV, computed or loaded; None if it is not whole in the pool."""
        found = map(self._store.blocks_of, self._keys(chunks, prefix, salt))
        return [self._tier_client.digest(blocks) if blocks else None for blocks in found]

    def time_copies(self, blocks: int) -> tuple[float, float]:
        """Seconds that blocks of the pool take to host memory, and back, in an idle engine."""
        return self._tier_client.time_copies(blocks)

    def pin(self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None) -> None:
        """Keep chunks in the pool. Raises ConfigError for one that is not there."""
        for key in self._keys(chunks, prefix, salt):
            if not self._store.pin(key):
                raise ConfigError("a chunk to pin is not in the KV pool", hint="warm it first")

    def unpin(self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None) -> None:
        """Let chunks be evicted again."""
        for key in self._keys(chunks, prefix, salt):
            self._store.unpin(key)

    def drop(self, chunks: Chunks, prefix: Text | None = None, salt: str | None = None) -> int:
        """Forget chunks that are neither used by a request nor pinned; return how many."""
        return sum(map(self._store.drop, self._keys(chunks, prefix, salt)))

    def _keys(self, chunks: Sequence[Chunk], prefix: Text | None, salt: str | None) -> list[Key]:
        keys = [self._key(chunk, prefix, salt) for chunk in chunks]
        return [key for key in keys if key is not None]

    def _key(self, chunk: Chunk, prefix: Text | None, salt: str | None) -> Key | None:
        canonical = self._locate(_request(chunk, prefix, salt))
        return canonical.key if canonical else None


def _request(chunk: Chunk, prefix: Text | None, salt: str | None) -> Request:
    """A request that has a chunk compiled: some text must follow, so one token is generated."""
    segments = [*([prefix] if prefix else []), chunk, Text(tokens=(0,))]
    return Request(segments, max_tokens=1, salt=salt)
