"""What vLLM's KV cache manager does in another way: lookups, last blocks of chunks, and KV events.

Where all layers have one kind of cache, of one block size, all that is left of vLLM's general way
to look up a prompt is a look into a dictionary: for 2,050 blocks 0.3 instead of 1.4 ms on CPU,
before the first token.

No query sees the slots after a chunk's last token, so a compile does not compute them: of a chunk
of 170 tokens they are 3 % of the work. vLLM caches only blocks that are full, and so has to be told
that such a block is. What was in it before is zeroed: attention multiplies hidden values by zero,
which is not zero for all that a block may have held, and tiers store whole blocks, in which nothing
of another tenant's may be left.

KV events tell routers which tokens' KV a server has. vLLM takes the tokens of blocks in the order
in which they are computed, which plans change.

Upstream: kv_cache_manager.py, block_pool.py and `KVCacheCoordinator.cache_blocks` in
kv_cache_coordinator.py, all in vllm/v1/core, and `SchedulerOutput.new_block_ids_to_zero`, of vLLM
0.32.0.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from picbench.engines.planning.pages import SlotKind
from picbench.engines.planning.plan import Plan
from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.linker import Linker
from picbench.engines.vllm.scheduler.pool import Pool, listen

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class PromptHits:
    """The cached blocks of prompts in one KV cache manager, whose layers have one kind of cache."""

    def __init__(self, manager: KVCacheManager, pool: Pool, block_size: int) -> None:
        more = "self, request, max_cache_hit_length"
        check_signature(KVCacheManager.get_computed_blocks, "self, request", more)
        check_signature(KVCacheManager.estimate_cached_tokens, "self, request")
        check_signature(KVCacheManager.record_prefix_cache_stats, "self, request, num_hits")
        self._manager = manager
        self._pool = pool
        self._block_size = block_size
        #: Hits of tiers that vLLM has not been told of.
        self.external = PrefixCacheStats()

    def find(self, request: "Request") -> tuple[KVCacheBlocks, int, int, bool]:
        """As `_get_local_prefix_cache_hit` answers: the prompt's last token is computed anyway."""
        manager = self._manager
        if not manager.prefix_cache_lookup_enabled(request):
            return manager.empty_kv_cache_blocks, 0, 0, False
        most = (request.num_tokens - 1) // self._block_size
        blocks = self._pool.find_first(islice(request.block_hashes, most))
        return manager.create_kv_cache_blocks((blocks,)), len(blocks) * self._block_size, 0, False

    def estimate_cached_tokens(self, request: "Request") -> int:
        """What `KVCacheManager.estimate_cached_tokens` answers."""
        [blocks] = self._manager.get_blocks(request.request_id).blocks
        return max(filter(None, map(_TOKENS, blocks)), default=0)

    def count(self, request: "Request", loaded: Mapping[str, int]) -> None:
        """Count a planned request's tokens and hits for vLLM's metrics, when it is first scheduled.

        As `KVCacheManager.record_prefix_cache_stats`, and as `Scheduler.schedule` counts what a
        connector found, but in tokens that the user sent: those of the request's own statistics, of
        which vLLM makes its other metrics and the usage. `loaded` are tokens by tier.
        """
        stats, prefill = self._manager.prefix_cache_stats, request.prefill_stats
        if stats is None or prefill is None or request.num_preemptions:
            return
        prompt, pooled = prefill.num_prompt_tokens, prefill.num_local_cached_tokens
        stats.record(prompt, pooled, preempted=False)
        sources = Counter[CacheHitSource]()
        for tier, tokens in loaded.items():
            sources[_SOURCES.get(tier.partition(":")[0], _EXTERNAL)] += tokens
        self.external.record(prompt - pooled, sources.total(), False, dict(sources))


#: vLLM's names of where KV was, by kind of tier; those of all others are one.
_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
_EXTERNAL = CacheHitSource.EXTERNAL_UNSPECIFIED

_TOKENS: Any = attrgetter("block_hash_num_tokens")


#: From a request's id to the ids of its blocks.
BlockIds = Callable[["Request"], tuple[int, ...]]


class ChunkTails:
    """Caches and zeroes the last blocks of chunks that one scheduler has compiled."""

    def __init__(self, coordinator: KVCacheCoordinator, jobs: ChunkJobs, block_size: int) -> None:
        upstream = type(coordinator).cache_blocks
        check_signature(upstream, "self, request, num_computed_tokens")
        self._cache_blocks = coordinator.cache_blocks
        self._jobs = jobs
        self._block_size = block_size

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """What the coordinator's own does; a computed chunk's last block counts as full.

        No other request's last block does: a request has the key of a block as soon as it has the
        block's last token, which may have been generated and is then not computed yet.
        """
        computed = num_computed_tokens >= request.num_prompt_tokens
        if computed and self._jobs.find(request.request_id) is not None:
            num_computed_tokens = len(request.block_hashes) * self._block_size
        self._cache_blocks(request, num_computed_tokens)

    def zero_new(self, output: "SchedulerOutput", block_ids: BlockIds) -> None:
        """Have the workers zero those of these blocks that a step is the first to write into."""
        found: list[int] = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            job = self._jobs.find(request_id)
            if job is None or not (rest := len(job.plan.tokens) % self._block_size):
                continue
            begin, computed = len(job.plan.tokens) - rest, job.request.num_computed_tokens
            if computed - tokens <= begin < computed:
                found.append(block_ids(job.request)[begin // self._block_size])
        if found:
            output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), *found]


class ChunkEvents:
    """Has a block pool tell of chunks by their own tokens, and of plain requests as vLLM does.

    A chunk's blocks are stored under their keys, the first without a parent, wherever the chunk
    stands in prompts. Told are blocks that are full of its tokens, as in stock vLLM, and the text
    that a prompt begins with; no other prompt is looked up by what is computed after a chunk. A
    block is removed when the last one with its key is.
    """

    def __init__(self, block_pool: BlockPool, linker: Linker, faults: Faults) -> None:
        for name, parameters in _EVENTS.items():
            check_signature(getattr(BlockPool, name), *parameters)
        self._linker = linker
        self._pool = block_pool
        self._faults = faults
        self._told = set[Any]()
        self._upstream = block_pool._build_block_stored_event
        self._emit_removed = block_pool._emit_block_removed_events
        self._take = block_pool.take_events
        block_pool._build_block_stored_event = self._stored  # type: ignore[method-assign,assignment]
        block_pool._emit_block_removed_events = self._removed  # type: ignore[method-assign]
        block_pool.take_events = self._taken  # type: ignore[method-assign]
        listen(block_pool, self)

    def on_block_evicted(self, block: Any) -> None:
        """Nothing to do: the pool emits an event."""

    def reset(self) -> None:
        """All keys were dropped, and the pool has told so."""
        self._told.clear()

    def _stored(self, request: "Request", **stored: Any) -> None:
        # vLLM calls this while it allocates blocks, which must not be left half done.
        self._faults.succeeds("tell of blocks", None, lambda: self._tell(request, stored))

    def _tell(self, request: "Request", stored: dict[str, Any]) -> None:
        plan = self._linker.plan_of(request.request_id)
        if plan is None and not self._linker.is_plain(request.request_id):
            return
        event = self._upstream(request, **stored)
        first = stored["start_token_idx"] // event.block_size
        for told in [event] if plan is None else _plan_events(plan, event, first, request):
            self._told.update(told.block_hashes)
            self._pool.kv_event_queue.append(told)

    def _removed(self, block_hashes: list[Any]) -> None:
        cached = self._pool.cached_block_hash_to_block
        for key in block_hashes:
            name = maybe_convert_block_hash(get_block_hash(key))
            if name in self._told and cached.get_one_block(key) is None:
                self._told.discard(name)
                self._emit_removed([key])

    def _taken(self) -> list[Any]:
        # The pool appends what `_stored` returns, too.
        return [event for event in self._take() if event is not None]


def _plan_events(
    plan: Plan, event: "BlockStored", first: int, request: "Request"
) -> "Iterator[BlockStored]":
    """Events of chunks and of a prompt's beginning for vLLM's `event` of blocks from `first` on."""
    size, placed = event.block_size, len(plan.pages) - len(plan.computed)
    pages, names = plan.pages, list[Any]([event.parent_block_hash, *event.block_hashes])
    # After copies, and where a worker decides what is linked, no other prompt finds anything.
    text = None if plan.copies or plan.picks else SlotKind.PROMPT

    def kind(index: int) -> SlotKind | None:
        page, at = pages[index], (index - placed) * size
        if page.canonical:
            return SlotKind.CHUNK if at >= 0 and len(page.visible.tokens) == size else None
        begins = (page.positions[0], page.positions[-1]) == (at, at + size - 1)
        return text if begins and set(page.kinds) == {SlotKind.PROMPT} else None

    for told, run in groupby(range(first, min(first + len(names) - 1, len(pages))), kind):
        blocks = [*run]
        if told is not None:
            made, at = copy(event), blocks[0] - first
            continues = blocks[0] > placed and kind(blocks[0] - 1) is told
            made.parent_block_hash = names[at] if continues else None
            made.block_hashes = names[at + 1 :][: len(blocks)]
            made.token_ids = [*chain.from_iterable(pages[index].tokens for index in blocks)]
            salt = None if continues or not request.cache_salt else (request.cache_salt,)
            made.extra_keys = [salt, *[None] * (len(blocks) - 1)]
            yield made


_STORED = (
    "self, request, block_hashes, parent_block_hash, start_token_idx, end_token_idx, block_size, "
    "kv_cache_group_id, extra_keys_list"
)

#: Parameters of methods, where releases differ those of each.
_EVENTS = {
    "_build_block_stored_event": (_STORED, f"{_STORED}, lookahead_token_ids"),
    "_emit_block_removed_events": ("self, block_hashes",),
    "take_events": ("self",),
}
