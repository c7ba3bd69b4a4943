"""The last blocks of chunks that end inside a block.

No query sees the slots after a chunk's last token, so a compile does not compute them: of a chunk
of 170 tokens they are 3 % of the work. vLLM caches only blocks that are full, and so has to be told
that such a block is. What was in it before is zeroed: attention multiplies hidden values by zero,
which is not zero for all that a block may have held, and tiers store whole blocks, in which nothing
of another tenant's may be left.

Upstream: `KVCacheCoordinator.cache_blocks` in vllm/v1/core/kv_cache_coordinator.py, and
`SchedulerOutput.new_block_ids_to_zero`, of vLLM 0.32.0.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from picbench.engines.vllm.compat import check_signature
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

#: From a request's id to the ids of its blocks.
BlockIds = Callable[["Request"], tuple[int, ...]]


class ChunkTails:
    """Caches and zeroes the last blocks of chunks that one scheduler has compiled."""

    def __init__(self, coordinator: KVCacheCoordinator, jobs: ChunkJobs, block_size: int) -> None:
        upstream = type(coordinator).cache_blocks
        check_signature(upstream, ("self", "request", "num_computed_tokens"))
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
