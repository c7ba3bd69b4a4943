"""A vLLM KV connector for the chunk cache's tiers: asynchronous loads and their failures.

Upstream: vllm/distributed/kv_transfer/kv_connector/v1/base.py of vLLM 0.32.0. vLLM creates one
connector in the scheduler and one in every worker. The scheduler's delegates to the linker, the
worker's to the tier client; commands and results travel with each step.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.transfers import (
    StepTimes,
    TransferCommands,
    TransferResults,
)
from picbench.engines.vllm.faults import Faults
from picbench.engines.vllm.metrics import ConnectorMetrics, tier_values
from picbench.engines.vllm.settings import PicSettings
from picbench.engines.vllm.transfer.step_clock import StepTimesWatch
from picbench.engines.vllm.transfer.tier_client import TierClient


class TransferPlanner(Protocol):
    """The linker, as the scheduler's connector calls it; nothing raises."""

    def external_tokens(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a tier or a copy provides, and whether that takes steps; None: not now."""

    def on_allocated(self, request: Any, block_ids: tuple[int, ...], external: int) -> None:
        """Blocks were allocated, some of them for `external` tokens."""

    def on_transfer_results(self, results: TransferResults) -> None:
        """Results of a step have arrived."""


@dataclass
class StepTransferCommands(KVConnectorMetadata):
    """Commands of a step, sent to the workers; an `idle` step computes nothing."""

    commands: TransferCommands = field(default_factory=TransferCommands)
    idle: bool = False


@dataclass
class StepTransferResults(KVConnectorWorkerMetadata):
    """Results of a step, sent to the scheduler."""

    results: TransferResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepTransferResults":
        """Combine the results of two workers."""
        assert isinstance(other, StepTransferResults)
        return StepTransferResults(self.results.merge(other.results))


class PicConnector(ConnectorMetrics, KVConnectorBase_V1):
    """Moves chunk KV between the pool and its tiers; the role decides which half is used."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._planner: TransferPlanner | None = None
        self._store: ChunkStore | None = None
        self._tier_client: TierClient | None = None
        self._idle = False
        self._faults = Faults()
        self._watch = StepTimesWatch()
        if role == KVConnectorRole.WORKER:
            settings = PicSettings.read(vllm_config.additional_config) or PicSettings()
            tiers = settings.on(vllm_config.device_config.device_type).tiers
            self._tier_client = TierClient(tiers or "")
            self.report(tier_values, self._tier_client)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, nothing worse."""
        return False

    def set_planner(self, planner: TransferPlanner, store: ChunkStore) -> None:
        """Scheduler: delegate to a linker, and send the commands of its store."""
        self._planner, self._store = planner, store

    @property
    def step_times(self) -> StepTimes:
        """Scheduler: the times of steps since the engine started; zero without tiers."""
        return self._watch.total

    @property
    def tier_client(self) -> TierClient:
        """Worker: the client that moves the bytes."""
        assert self._tier_client is not None
        return self._tier_client

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Scheduler: tokens of a request that a tier or a copy provides."""
        assert self._planner is not None
        return self._planner.external_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Scheduler: command the transfers that fill the allocated blocks."""
        assert self._planner is not None
        block_ids = tuple(blocks.get_block_ids()[0])
        self._planner.on_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Scheduler: the commands of the step."""
        assert self._store is not None
        idle = scheduler_output.total_num_scheduled_tokens == 0
        return StepTransferCommands(self._store.commands.take(), idle)

    def update_connector_output(self, connector_output: Any) -> None:
        """Scheduler: receive the workers' results."""
        received = connector_output.kv_connector_worker_meta
        if isinstance(received, StepTransferResults) and self._planner is not None:
            self._watch.add(received.results.times)
            self._planner.on_transfer_results(received.results)

    def has_pending_push_work(self) -> bool:
        """Scheduler: keep stepping while transfers are under way."""
        return self._store is not None and self._store.has_pending_work()

    def reset_cache(self) -> bool | None:
        """Scheduler: delete what this engine stored in tiers."""
        if self._store is not None:
            self._store.reset_tiers()
        return True

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Worker: the pool's tensors, one per layer."""
        self.tier_client.register_kv_caches(list(kv_caches.values()))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Worker: read blocks of the last step before this one overwrites them.

        vLLM calls this in every step, whether or not anything was preempted: model runner V1 before
        anything else (vllm/v1/worker/gpu_model_runner.py, execute_model), V2 before the model runs
        (vllm/v1/worker/gpu/kv_connector.py, pre_forward), which is after it zeroes blocks. Only the
        first call of a step has commands, so that runners may call this earlier.
        """
        assert isinstance(kv_connector_metadata, StepTransferCommands)
        self._idle = kv_connector_metadata.idle
        commands = kv_connector_metadata.commands.take()
        if not self._faults.succeeds(
            "start transfers", None, lambda: self.tier_client.start(commands)
        ):
            self.tier_client.give_up(commands)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Worker: nothing to do, `handle_preemptions` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Worker: nothing to do, a request runs only after its blocks are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Worker: nothing to do, chunks are stored as a whole."""

    def wait_for_save(self) -> None:
        """Worker: nothing to do, stores have copied what they need."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Worker: the loads that finished since the last step."""
        if self._idle:
            self.tier_client.wait()
        # Loads that are not finished now are finished after the next step.
        none: tuple[set[str], set[str]] = (set(), set())
        done, failed = self._faults.attempt(
            "finish loads", None, self.tier_client.finish_loads, none
        )
        return KVConnectorTransferResults(finished_recving=done | failed, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Worker: the other results of the step."""
        later = TransferResults(pending=1)
        results = self._faults.attempt(
            "report transfers", None, self.tier_client.take_results, later
        )
        return StepTransferResults(results)

    def shutdown(self) -> None:
        """Worker: finish what takes seconds at most, then close the tiers."""
        if self._tier_client is not None:
            self._tier_client.close()
