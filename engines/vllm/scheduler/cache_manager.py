"""What vLLM's KV cache manager does in another way: lookups of prompts, and last blocks of chunks.

Where all layers have one kind of cache, of one block size, all that is left of vLLM's general way
to look up a prompt is a look into a dictionary: for 2,050 blocks 0.3 instead of 1.4 ms on CPU,
before the first token.

No query sees the slots after a chunk's last token, so a compile does not compute them: of a chunk
of 170 tokens they are 3 % of the work. vLLM caches only blocks that are full, and so has to be told
that such a block is. What was in it before is zeroed: attention multiplies hidden values by zero,
which is not zero for all that a block may have held, and tiers store whole blocks, in which nothing
of another tenant's may be left.

Upstream: kv_cache_manager.py and `KVCacheCoordinator.cache_blocks` in kv_cache_coordinator.py, both
in vllm/v1/core, and `SchedulerOutput.new_block_ids_to_zero`, of vLLM 0.32.0.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
from picbench.engines.vllm.scheduler.pool import Pool

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class PromptHits:
    """The cached blocks of prompts in one KV cache manager, whose layers have one kind of cache."""

    def __init__(self, manager: KVCacheManager, pool: Pool, block_size: int) -> None:
        for name in ("get_computed_blocks", "estimate_cached_tokens"):
            check_signature(getattr(KVCacheManager, name), "self, request")
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
