"""A scheduler without an engine: nothing is computed, and tests say what the workers answer."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from picbench.engines.chunk_cache.transfers import TransferCommands, TransferResults
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.vllm.frontend.plugin import register
from picbench.engines.vllm.scheduler.scheduler import PicAsyncScheduler, PicScheduler
from picbench.engines.vllm.settings import PicSettings, engine_arguments
from picbench.engines.vllm.transfer.connector import StepTransferCommands, StepTransferResults

#: The token that every step samples.
SAMPLED = 9


@dataclass(slots=True)
class Step:
    """What was scheduled, which of it samples, and the commands for the tiers."""

    output: SchedulerOutput
    samples: list[str]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens by the id of their request."""
        return dict(self.output.num_scheduled_tokens)

    @property
    def commands(self) -> TransferCommands:
        """Commands for the tiers."""
        metadata = self.output.kv_connector_metadata
        assert isinstance(metadata, StepTransferCommands)
        return metadata.commands


@dataclass(slots=True)
class Bench:
    """Steps of a scheduler, `ahead` of the model or not; `ended` are the answers, by request.

    `counted` is what the scheduler counted in each step, if it counts; `told` are its KV events.
    """

    scheduler: PicScheduler
    ahead: bool
    ended: dict[str, Any] = field(default_factory=dict)
    counted: list[Any] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    _steps: deque[Step] = field(default_factory=deque)

    def submit(
        self,
        name: str,
        *chunks: tuple[int, ...],
        question: tuple[int, ...] = (7, 8),
        algorithm: str = "naive",
        max_tokens: int = 1,
        priority: int = 0,
        tag: str | None = None,
        usage: bool | None = None,
        lead: tuple[int, ...] = (),
        salt: str | None = None,
    ) -> Any:
        """A request for chunks, text before them, and a question after them."""
        spans, tokens = list[list[int]](), [*lead]
        for chunk in chunks:
            spans.append([len(tokens), len(tokens) + len(chunk)])
            tokens += chunk
        pic = {"spans": spans, "algorithm": algorithm, "tag": tag, "usage": usage}
        extra = {"pic": pic} if chunks or usage is not None else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(
            name,
            [*tokens, *question],
            params,
            None,
            priority=priority,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
            arrival_time=float(len(self.scheduler.requests)),
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Step:
        """Schedule a step; it ends when `finish` is called."""
        output = self.scheduler.schedule()
        ids = output.num_scheduled_tokens
        samples = [i for i in ids if not self.scheduler.requests[i].is_prefill_chunk]
        self._steps.append(Step(output, samples))
        return self._steps[-1]

    def finish(
        self,
        results: TransferResults | None = None,
        *,
        loaded: set[str] = frozenset(),  # type: ignore[assignment]
        failed: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> None:
        """End the oldest step, with the tiers' results and the requests whose loads have ended."""
        step = self._steps.popleft()
        ids = [*step.tokens]
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[SAMPLED] * (name in step.samples) for name in ids],
            kv_connector_output=KVConnectorOutput(
                finished_recving=loaded | failed,
                failed_recving=failed,
                kv_connector_worker_meta=StepTransferResults(results or TransferResults()),
            ),
        )
        for client in self.scheduler.update_from_output(step.output, answer).values():
            self.ended |= {o.request_id: o for o in client.outputs if o.finished}
            self.counted += filter(None, [client.scheduler_stats])

    def step(self, results: TransferResults | None = None, **loads: set[str]) -> Step:
        """Schedule a step and end it, or where steps are scheduled ahead the one before."""
        step = self.schedule()
        if len(self._steps) > self.ahead:
            self.finish(results, **loads)
        return step

    def run(self, steps: int = 60) -> list[dict[str, int]]:
        """Step until nothing is left; returns what each step computed."""
        found = []
        for _ in range(steps):
            found.append(self.step().tokens)
            if not self.scheduler.requests:
                while self._steps:
                    self.finish()
                return found
        raise AssertionError(f"requests wait for ever: {[*self.scheduler.requests]}")

    @property
    def free(self) -> int:
        """Blocks without references."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def bench(
    model: Path,
    *,
    blocks: int = 60,
    batch_tokens: int = 64,
    ahead: bool = False,
    policy: str = "fcfs",
    counts: bool = False,
    events: bool = False,
    **settings: Any,
) -> Bench:
    """A scheduler of a pool of `blocks`; with `counts` it counts for vLLM's metrics.

    With `events` it tells of blocks, to `told`.
    """
    register()
    init_none_hash(sha256_cbor)
    arguments = engine_arguments(PicSettings(**{"tiers": "", **settings}), "cpu")
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=blocks * BLOCK_SIZE,
        max_num_batched_tokens=batch_tokens,
        scheduling_policy=policy,  # type: ignore[arg-type]
        num_gpu_blocks_override=blocks + 1,
        kv_events_config=KVEventsConfig(events, publisher="null"),
        **arguments,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks + 1
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    pool = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = (PicAsyncScheduler if ahead else PicScheduler)(
        config, pool, StructuredOutputManager(config), BLOCK_SIZE, log_stats=counts
    )
    # As vLLM has it wherever steps are scheduled ahead and there is a connector.
    scheduler.defer_block_free = ahead
    made = Bench(scheduler, ahead)
    scheduler.kv_event_publisher = SimpleNamespace(  # type: ignore[assignment]
        publish=lambda batch: made.told.extend(batch.events)
    )
    return made
