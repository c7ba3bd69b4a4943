"""The offline engine: segments in, tokens, timings and block counts out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from picbench.engines.algorithms import of_chunks, parse
from picbench.engines.chunk_cache.tiers.notation import without_credentials
from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.conversion import (
    ModelTokenizer,
    PreparedRequest,
    RequestPreparer,
    make_result,
)
from picbench.engines.ledger import MemoryUse, Snapshot
from picbench.engines.pace import Pace, Submission
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.engines.self_check import (
    CheckedPrompts,
    Comparison,
    SelfCheck,
    checked_prompts,
    compare_answers,
)
from picbench.engines.vllm.device import cpu_shares
from picbench.engines.vllm.launch import Launched, launch
from picbench.engines.vllm.worker.probes import compiled_kernels, measure_memory, watch_compilations
from picbench.errors import ConfigError, EngineError, check_counts

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from picbench.engines.cache import ChunkCache
    from picbench.engines.vllm.scheduler.linker import Linker
    from picbench.engines.vllm.scheduler.prompt_cost import PromptCost
    from picbench.engines.vllm.transfer.tier_client import TierClient


#: Tokens of the longest prompt, and of its chunks.
_LONGEST, _LARGE = 32_000, 500

#: Tokens after the chunks, and the chunks of prompts with few and many linked tokens: how many, and
#: tokens of each.
_TAIL = 40
_FEW, _MANY = (1, 700), (12, 50)


def warm_up_requests(longest: int, device: str, *, chunks: bool) -> Iterator[Request]:
    """Requests that use each kernel; each is to be served twice, cold and warm.

    Kernels are compiled when they are first used: those for plain requests and, with `chunks`, for
    compiling chunks and for linking few and many tokens. Prompts of more than `longest` tokens are
    left out: the engine will never serve any like them. On a GPU there is also a long one, because
    the first large steps of engines with chunks took 165 ms more than later ones (H200, 8B shape,
    8,192 tokens in 17 chunks), though all kernels were compiled.
    """
    tail = min(_TAIL, longest)
    yield Request([Text(tokens=(1,) * tail)])
    shapes = [_FEW, _MANY] if chunks else []
    if device == "cuda":
        shapes.append((min(longest - tail, _LONGEST) // _LARGE, _LARGE))
    for count, length in shapes:
        if 0 < count * length <= longest - tail:
            documents = [Chunk(tokens=(i + 1,) * length) for i in range(count)]
            yield Request([*documents, Text(tokens=(1,) * tail)])


#: Plain prompts that are submitted before a step, in steps' worth of tokens.
_STEPS_AHEAD = 4


class Engine(AbstractContextManager["Engine"]):
    """vLLM with picbench in it (or, with `EngineConfig.stock`, without), in this process.

    Raises ConfigError for settings and requests that cannot work, before anything is computed, and
    InvalidRun if `EngineConfig.self_check` finds that its answers are wrong. Use it as a context
    manager, or call `close`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._tokenizer = ModelTokenizer(config.model)
        self._preparer = RequestPreparer(config, self._tokenizer)
        if config.self_check and config.stock:
            raise ConfigError("stock vLLM has no self-check", hint="leave `self_check` off")
        self._launched: Launched | None = launch(self._tokenizer.complete(config))
        self._submitted: dict[str, PreparedRequest] = {}
        # Outputs of submitted requests that `step` has not returned yet.
        self._ended: dict[str, RequestOutput] = {}
        self._busy_s = 0.0
        self._closed_by = ""
        if config.self_check:
            try:
                self.self_check().require()
            except BaseException:
                self.close()
                raise
            self._running.ledger.forget()

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int = 16,
        logprobs: int | None = None,
        ignore_eos: bool = False,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Result]:
        """Serve requests and return their results in the same order.

        At most `concurrency` requests are in flight (None: any number). With `arrivals`, each
        request is submitted that many seconds from now, never earlier, and its latency counts
        from that time even if it is submitted later (an open loop). `max_tokens` holds for
        requests that name none. With `logprobs`, each result has that many log-probabilities a
        token. Raises ConfigError for a request that can never be served, before any is started.
        """
        check_counts(max_tokens=max_tokens, concurrency=concurrency)
        prepared = [self._prepare(r, max_tokens, logprobs, ignore_eos) for r in requests]
        pace = Pace(prepared, concurrency or len(prepared), arrivals)
        began = time.monotonic()
        served = self._serve(prepared, pace)
        self._busy_s = time.monotonic() - began
        return [
            make_result(p, *served[p.tag], self._report(p.tag), self._tokenizer) for p in prepared
        ]

    def submit(
        self,
        request: Request,
        *,
        max_tokens: int = 16,
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> str:
        """Queue a request and return its tag, for callers that decide between steps what to do.

        `step` serves it, `abort` ends it; for the rest see `generate`. While that runs, or `drain`,
        submitted requests run beside it, and the next `step` returns their results. Raises
        ConfigError for a request that can never be served.
        """
        prepared = self._prepare(request, max_tokens, logprobs, ignore_eos)
        self._submit(Submission(prepared, time.time(), 0.0))
        self._submitted[prepared.tag] = prepared
        return prepared.tag

    def step(self) -> dict[str, Result]:
        """Run one scheduler step; results, by tag, of submitted requests that have ended by now."""
        self._step()
        ended, self._ended = self._ended, {}
        return {
            tag: make_result(
                self._submitted.pop(tag), output, 0.0, self._report(tag), self._tokenizer
            )
            for tag, output in ended.items()
        }

    def abort(self, tag: str) -> None:
        """End a submitted request without a result; one that has ended is ignored."""
        if self._submitted.pop(tag, None) is not None:
            self._ended.pop(tag, None)
            self._running.engine.abort_request([tag])
            self._report(tag)

    def warm_up(self, algorithm: str | None = None) -> None:
        """Serve a few requests, and drop their KV, so that first-use costs are not measured."""
        running, stock = self._running, self.config.stock
        longest = min(running.context, running.pool * BLOCK_SIZE // 2) - 2
        for plain in warm_up_requests(longest, self._device, chunks=not stock):
            request = replace(plain, algorithm=algorithm)
            with suppress(ConfigError):
                for _ in range(2):
                    self.generate([request], max_tokens=2, ignore_eos=True)
        self.reset()
        self._running.ledger.forget()

    def checked_prompts(self) -> CheckedPrompts:
        """Random prompts with this engine's answers, for the self-check of another one.

        The engine must cache prefixes. Raises ConfigError if it is too small for any prompt.
        """
        running = self._running
        vocabulary = running.engine.vllm_config.model_config.get_vocab_size()
        slots = running.pool * BLOCK_SIZE
        return checked_prompts(self.generate, vocabulary, running.context, slots)

    def self_check(self, known: CheckedPrompts | None = None) -> SelfCheck:
        """Compare ways to the same answers, and drop their KV. Only where no request runs.

        `known` are answers of another engine with the model, by default this one's to plain
        requests.
        """
        running = self._running
        dtype = str(running.engine.vllm_config.model_config.dtype).removeprefix("torch.")
        found = compare_answers(self.generate, known or self.checked_prompts(), dtype)
        self.reset()
        return SelfCheck((*self._check_workers(), *found))

    def measure(self) -> None:
        """Begin a measurement: the block ledger starts again."""
        self._running.ledger.begin()

    @property
    def memory(self) -> list[Snapshot]:
        """The block ledger since `measure`, a snapshot of some 700 bytes for each scheduler step.

        An engine that is not measured keeps those of the latest 10,000 steps.
        """
        return self._running.ledger.snapshots

    @property
    def busy_s(self) -> float:
        """Seconds from the start of the last `generate`, once requests were checked, to its end."""
        return self._busy_s

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        """Bytes (loaded, stored) by tier since the start; none where that is not counted."""
        return {} if self.config.stock or self._tier_client is None else self.cache.moved

    @property
    def step_times(self) -> StepTimes:
        """Seconds of steps since the start, and what tiers took of them; zeros without tiers."""
        connector = getattr(self._running.scheduler, "connector", None)
        times: StepTimes = getattr(connector, "step_times", StepTimes())
        return times

    @property
    def workspace_bytes(self) -> int:
        """Memory that picbench's attention holds now beside the pool, on the worker with most.

        On a CPU it grows with what requests read.
        """
        engine = self._running.engine
        return 0 if self.config.stock else max(engine.collective_rpc("workspace_bytes"))

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks to another one since the engine started."""
        return self._running.ledger.preemptions

    @property
    def memory_use(self) -> list[MemoryUse]:
        """What each worker holds in memory now."""
        found: list[MemoryUse] = self._running.engine.collective_rpc(measure_memory)
        return found

    @property
    def evictions(self) -> Mapping[str, int]:
        """Blocks by kind, `chunk` and `prefix`, that lost their KV to requests since the start."""
        return self._running.ledger.evictions

    def reset(self, *, tiers: bool = True) -> None:
        """Drop KV in the pool. Raises EngineError if requests run.

        With `tiers`, drop it there, too, and forget which chunks were seen (`auto`).
        """
        if self._running.engine.has_unfinished_requests():
            raise EngineError("the cache cannot be dropped while requests run")
        self.drain()
        if not self._running.scheduler.reset_prefix_cache(reset_connector=tiers):
            raise EngineError("the cache cannot be dropped while requests hold blocks")
        if tiers and self._linker:
            self._running.scheduler.chooser.forget()
        self.drain()

    def drain(self) -> None:
        """Run until no request runs, and no transfer between the pool and the tiers is pending."""
        core: Any = self._running.engine.engine_core
        core = core.engine_core
        # A step that was scheduled ahead may begin transfers of which the scheduler learns later.
        while core.scheduler.has_requests() or core.batch_queue:
            self._step()

    @property
    def cache(self) -> "ChunkCache":
        """The chunk cache. Raises ConfigError in an engine whose cache cannot be inspected."""
        from picbench.engines.cache import ChunkCache

        if self.config.stock:
            raise ConfigError("stock vLLM has no chunk cache", hint="leave `stock` off")
        tier_client = self._tier_client
        if tier_client is None:
            raise ConfigError(
                "the chunk cache of several workers cannot be looked into",
                hint="use `tensor_parallel=1`",
            )
        store = self._running.scheduler.chunk_store
        locate = partial(self._preparer.canonical, running=self._running)
        # Chunks that are named are compiled, also where others are served as text.
        algorithm = of_chunks(parse(self.config.algorithm)).spec

        def serve(requests: Sequence[Request]) -> object:
            return self.generate([replace(r, algorithm=algorithm) for r in requests])

        return ChunkCache(store, tier_client, serve, locate, self.drain)

    @property
    def drained(self) -> bool:
        """Whether no request and no transfer is left, and none of the pool's blocks is held."""
        scheduler = self._running.scheduler
        linker: Linker | None = getattr(scheduler, "linker", None)
        pool = scheduler.kv_cache_manager.block_pool
        left = scheduler.requests or (linker and not linker.idle)
        # The first block is vLLM's own (vllm/v1/core/block_pool.py, null_block).
        return not left and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def watch_compilations(self) -> None:
        """Begin to note which kernels are compiled in this engine's workers."""
        self._running.engine.collective_rpc(watch_compilations)

    @property
    def compilations(self) -> list[str]:
        """Kernels, by dotted name, that any worker compiled since `watch_compilations`."""
        found = self._running.engine.collective_rpc(compiled_kernels)
        return [kernel for worker in found for kernel in worker]

    def note_picks(self) -> None:
        """Begin to note which tokens the workers pick for requests."""
        from picbench.engines.vllm.worker.token_picker import note_picks

        self._running.engine.collective_rpc(note_picks)

    @property
    def noted_picks(self) -> list[tuple[int, ...]]:
        """Prompt positions of the tokens picked since `note_picks`, by request in their order."""
        from picbench.engines.vllm.worker.token_picker import noted_picks

        workers: list[list[tuple[int, ...]]] = self._running.engine.collective_rpc(noted_picks)
        if any(worker != workers[0] for worker in workers):
            raise EngineError("workers picked different tokens")
        return workers[0]

    def describe(self) -> dict[str, Any]:
        """What runs here: versions, device, pool, limits."""
        running = self._running
        config = running.engine.vllm_config
        return {
            **_versions(),
            **cpu_shares(config),
            "device": self._device,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "attention": "stock" if self.config.stock else "picbench",
            "block_size": config.cache_config.block_size,
            "kv_blocks": running.pool,
            "block_bytes": _block_bytes(running.scheduler.kv_cache_config),
            "workspace_bytes": self.workspace_bytes,
            "context": running.context,
            "capacity": running.capacity,
            "batch_tokens": config.scheduler_config.max_num_batched_tokens,
            "graph_tokens": max(config.compilation_config.cudagraph_capture_sizes or (), default=0),
            "tiers": "" if self.config.stock else without_credentials(running.config.tiers or ""),
            "notes": list(running.notes),
        }

    def close(self) -> None:
        """Shut the engine down; it cannot be used again."""
        if self._launched is not None:
            self._launched.engine.engine_core.shutdown()
            self._launched = None

    def _check_workers(self) -> Iterator[Comparison]:
        """What the workers compare themselves; of several workers the largest differences."""
        answers: Any = self._running.engine.collective_rpc("self_check")
        for same in zip(*answers, strict=True):
            names, errors, tolerances = zip(*same, strict=True)
            yield Comparison(names[0], max(errors), tolerances[0])

    @property
    def _tier_client(self) -> "TierClient | None":
        """What moves chunk KV in this process; with tensor parallelism workers have their own."""
        executor: Any = self._running.engine.model_executor
        driver = getattr(executor, "driver_worker", None)
        return driver.worker.tier_client if driver is not None else None

    @property
    def _running(self) -> Launched:
        if self._launched is None:
            reason = f": {self._closed_by}" if self._closed_by else ""
            raise EngineError(f"the engine is closed{reason}", hint="make another one")
        return self._launched

    def _prepare(
        self, request: Request, max_tokens: int, logprobs: int | None, ignore_eos: bool
    ) -> PreparedRequest:
        return self._preparer.prepare(request, self._running, max_tokens, logprobs, ignore_eos)

    @property
    def _device(self) -> str:
        return str(self._running.engine.vllm_config.device_config.device)

    def _serve(
        self, prepared: Sequence[PreparedRequest], pace: Pace[PreparedRequest]
    ) -> "dict[str, tuple[RequestOutput, float]]":
        """Outputs, and how many seconds late each request was submitted, by tag."""
        late: dict[str, float] = {}
        done: dict[str, Any] = {}
        try:
            while pace:
                for submission in self._ahead(pace):
                    self._submit(submission)
                    late[submission.item.tag] = submission.late
                if pace.idle:
                    self._running.ledger.note()
                    pace.wait()
                    continue
                for output in self._step():
                    done[output.request_id] = output
                    pace.finished()
        except BaseException:
            if self._launched is not None:
                self._running.engine.abort_request([p.tag for p in prepared if p.tag not in done])
                # No one gets a result any more, of those that have ended neither.
                for one in prepared:
                    self._report(one.tag)
            raise
        return {tag: (output, late[tag]) for tag, output in done.items()}

    def _step(self) -> "list[RequestOutput]":
        """Run one scheduler step; keep what ended of submitted requests, and return the rest.

        A step that fails or is interrupted closes the engine: vLLM gives blocks their keys before
        they are computed, so that later requests, and with tiers other engines, would find KV that
        never was.
        """
        try:
            outputs: list[Any] = self._running.engine.step()
        except BaseException as error:
            self._closed_by = f"a step did not end ({type(error).__name__})"
            self.close()
            raise
        self._ended |= {o.request_id: o for o in outputs if o.request_id in self._submitted}
        return [output for output in outputs if output.request_id not in self._submitted]

    def _ahead(self, pace: Pace[PreparedRequest]) -> Iterator[Submission[PreparedRequest]]:
        """Requests to submit before the next step: one, and more while they do not fill it.

        Planning takes milliseconds, in which the device computes: of many long prompts the first
        ones start while others are planned.
        """
        config = self._running.engine.vllm_config.scheduler_config
        room = config.max_num_batched_tokens
        for submission in pace.due():
            yield submission
            prepared = submission.item
            slots = self._linker.new_slots(prepared.tag) if self._linker else None
            # Plain prompts are submitted fast, and may be cached for the most part.
            plain = len(prepared.prompt_token_ids) // _STEPS_AHEAD
            room -= plain if slots is None else slots
            if room <= 0:
                return

    def _submit(self, submission: Submission[PreparedRequest]) -> None:
        prepared = submission.item
        prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
        if prepared.cache_salt is not None:
            prompt["cache_salt"] = prepared.cache_salt
        self._running.engine.add_request(
            prepared.tag, prompt, prepared.sampling_params, arrival_time=submission.arrived
        )

    def _report(self, tag: str) -> "PromptCost | None":
        """What a request with chunks cost, once; None for a plain one."""
        return self._linker.take_cost(tag) if self._linker else None

    @property
    def _linker(self) -> "Linker | None":
        """The scheduler's; None in a stock engine."""
        found: Linker | None = getattr(self._running.scheduler, "linker", None)
        return found


def _block_bytes(config: Any) -> int:
    """Bytes of KV of BLOCK_SIZE tokens in all layers, on one worker."""
    specs = [(group.kv_cache_spec, len(group.layer_names)) for group in config.kv_cache_groups]
    return sum(
        int(spec.page_size_bytes) * layers * BLOCK_SIZE // int(spec.block_size)
        for spec, layers in specs
    )


def _versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    return {module.__name__: module.__version__ for module in (vllm, torch, transformers)}
