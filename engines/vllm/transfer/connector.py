"""The chunk cache's tiers as a vLLM KV connector, for its asynchronous loads and failure handling.

Upstream: vllm/distributed/kv_transfer/kv_connector/v1/base.py of vLLM 0.32.0. vLLM makes one
object of this class for the scheduler and one for every worker. The scheduler's is a thin front of
the linker, the worker's of the tier_client; orders and reports travel with each step.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from picbench.engines.chunk_cache.transfers import TransferCommands, TransferResults
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.transfer.tier_client import TierClient

if TYPE_CHECKING:
    from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJobs
    from picbench.engines.vllm.scheduler.linker import Linker


@dataclass
class StepTransferCommands(KVConnectorMetadata):
    """A step's orders on their way to the workers; an `idle` step computes nothing."""

    orders: TransferCommands = field(default_factory=TransferCommands)
    idle: bool = False


@dataclass
class StepTransferResults(KVConnectorWorkerMetadata):
    """A step's answers on their way to the scheduler."""

    reports: TransferResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepTransferResults":
        """What two workers say together."""
        assert isinstance(other, StepTransferResults)
        return StepTransferResults(self.reports.merge(other.reports))


class PicConnector(KVConnectorBase_V1):
    """Chunk KV between the pool and its tiers; both halves of it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._linker: Linker | None = None
        self._supply: ChunkJobs | None = None
        self._tier_client: TierClient | None = None
        self._idle = False
        if role == KVConnectorRole.WORKER:
            settings = PicSettings.read(vllm_config.additional_config) or PicSettings()
            self._tier_client = TierClient(settings.tiers)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, nothing worse."""
        return False

    def serve(self, linker: "Linker", supply: "ChunkJobs") -> None:
        """Scheduler: from now on answer for this linker."""
        self._linker, self._supply = linker, supply

    @property
    def tier_client(self) -> TierClient:
        """Worker: what moves the bytes."""
        assert self._tier_client is not None
        return self._tier_client

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Scheduler: tokens of a request that a tier or a copy provides."""
        assert self._linker is not None
        return self._linker.external(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Scheduler: order what fills the blocks that were allocated for them."""
        assert self._linker is not None
        block_ids = tuple(blocks.get_block_ids()[0])
        self._linker.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Scheduler: the step's orders."""
        assert self._supply is not None
        idle = scheduler_output.total_num_scheduled_tokens == 0
        return StepTransferCommands(self._supply.orders.take(), idle)

    def update_connector_output(self, connector_output: Any) -> None:
        """Scheduler: take over what the workers report."""
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, StepTransferResults) and self._linker is not None:
            self._linker.heard(found.reports)

    def has_pending_push_work(self) -> bool:
        """Scheduler: keep stepping while chunks are on their way into tiers."""
        return self._supply is not None and bool(self._supply.orders or self._supply.pending)

    def reset_cache(self) -> bool | None:
        """Scheduler: drop what this engine stored in tiers."""
        if self._supply is not None:
            self._supply.clear_tiers()
        return True

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Worker: the pool's tensors, one a layer."""
        self.tier_client.register(list(kv_caches.values()))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Worker: read blocks of the last step before this one overwrites them.

        vLLM calls this first of all in every step (vllm/v1/worker/gpu_model_runner.py,
        execute_model), whether or not anything was preempted.
        """
        assert isinstance(kv_connector_metadata, StepTransferCommands)
        self._idle = kv_connector_metadata.idle
        self.tier_client.carry_out(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Worker: nothing to do, `handle_preemptions` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Worker: nothing to do, no layer runs before its blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Worker: nothing to do, chunks are stored as a whole."""

    def wait_for_save(self) -> None:
        """Worker: nothing to do, stores have copied what they need."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Worker: the loads that ended since the last step."""
        if self._idle:
            self.tier_client.wait()
        done, failed = self.tier_client.ended()
        return KVConnectorTransferResults(finished_recving=done | failed, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Worker: what else the scheduler should know."""
        return StepTransferResults(self.tier_client.report())

    def shutdown(self) -> None:
        """Worker: give what is on its way a moment, then close the tiers."""
        if self._tier_client is not None:
            self._tier_client.close()
