"""The offline engine: segments in, tokens, timings and block counts out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from picbench.engines.algorithms import Registry, Reuse
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.ledger import Snapshot
from picbench.engines.pace import Departure, Pace
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.policy import Segment
from picbench.engines.request import (
    Chunk,
    Hits,
    PromptSegment,
    Request,
    Result,
    Text,
    Timings,
    TokenCounts,
)
from picbench.engines.tokenizer import ModelTokenizer
from picbench.engines.vllm.frontend.limits import check_request
from picbench.engines.vllm.launch import Launched, launch
from picbench.engines.vllm.settings import REJECTED, PicSettings
from picbench.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from picbench.engines.cache import ChunkCache
    from picbench.engines.planning.plan import Canonical
    from picbench.engines.vllm.scheduler.linker import Linker, PromptCost
    from picbench.engines.vllm.transfer.tier_client import TierClient


#: Prompts that are submitted between two steps, in steps' worth of tokens.
_STEPS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request in vLLM's terms, under the names that vLLM gives them."""

    tag: str
    prompt_token_ids: list[int]
    sampling_params: "SamplingParams"
    cache_salt: str | None


class Engine:
    """vLLM with picbench in it (or, with `EngineConfig.stock`, without), in this process.

    Raises ConfigError for settings and requests that cannot work, before anything is computed.
    Use it as a context manager, or call `close`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._registry = Registry()
        self._algorithm = self._registry.parse(config.algorithm)
        if config.stock and self._algorithm.reuse is Reuse.CHUNKS:
            raise _not_stock(config.algorithm)
        self._tokenizer = ModelTokenizer(config.model)
        self._numbers = count()
        self._launched: Launched | None = launch(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        requests that name none. With `logprobs`, each result carries that many log-probabilities
        a token. Raises ConfigError for a request that can never be served, before any is started.
        """
        prepared = [self._prepare(r, max_tokens, logprobs, ignore_eos) for r in requests]
        pace = Pace(prepared, concurrency or len(prepared), arrivals)
        served = self._serve(prepared, pace)
        return [self._result(p, *served[p.tag]) for p in prepared]

    def warm_up(self) -> None:
        """Run a few requests and forget them, so that first-use costs are not measured.

        Kernels are compiled when they are first used: those of plain requests, of compiling
        chunks, of linking few tokens and many, each cold and warm. What an engine has no room
        for is left out: it will never serve the like.
        """
        for request in self._rehearsal():
            with suppress(ConfigError):
                for _ in range(2):
                    self.generate([request], max_tokens=2, ignore_eos=True)
        self.reset()
        self.measure()

    def measure(self) -> None:
        """Begin a measurement: the ledger starts anew."""
        self._running.observer.begin()

    @property
    def memory(self) -> list[Snapshot]:
        """The block ledger since `measure`, one snapshot a scheduler step."""
        return self._running.observer.snapshots

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        """Bytes (loaded, stored) between the pool and each tier since the engine started.

        Empty where nothing is known: in a stock engine, and with workers in other processes.
        """
        return {} if self.config.stock or self._tier_client is None else self.cache.moved

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks to another one since the engine started."""
        return self._running.observer.preemptions

    def reset(self, *, tiers: bool = True) -> None:
        """Drop all cached KV, and with `tiers` what this engine stored behind the pool.

        Raises EngineError while requests run or chunks are pinned.
        """
        self.drain()
        if not self._running.scheduler.reset_prefix_cache(reset_connector=tiers):
            raise EngineError("the cache cannot be dropped while requests hold blocks")
        self.drain()

    def drain(self) -> None:
        """Run until nothing is on its way between the pool and the tiers."""
        core: Any = self._running.engine.engine_core
        while core.engine_core.scheduler.has_requests():
            self._running.engine.step()

    @property
    def cache(self) -> "ChunkCache":
        """The chunk cache. Raises ConfigError in an engine whose cache cannot be looked into."""
        from picbench.engines.cache import ChunkCache

        if self.config.stock:
            raise ConfigError("stock vLLM has no chunk cache", hint="leave stock off")
        tier_client = self._tier_client
        if tier_client is None:
            raise ConfigError(
                "the chunk cache of several workers cannot be looked into",
                hint="use tensor_parallel=1",
            )
        supply = self._running.scheduler.jobs
        return ChunkCache(supply, tier_client, self.generate, self._canonical, self.drain)

    def describe(self) -> dict[str, Any]:
        """What runs here: versions, device, pool, limits."""
        running = self._running
        config = running.engine.vllm_config
        return {
            **_versions(),
            "device": str(config.device_config.device),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "attention": "stock" if self.config.stock else "picbench",
            "block_size": config.cache_config.block_size,
            "kv_blocks": running.pool,
            "context": running.context,
            "capacity": running.capacity,
            "batch_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def close(self) -> None:
        """Shut the engine down; it cannot be used again."""
        if self._launched is not None:
            self._launched.engine.engine_core.shutdown()
            self._launched = None

    @property
    def _tier_client(self) -> "TierClient | None":
        """What moves chunk KV in this process; with tensor parallelism workers have their own."""
        executor: Any = self._running.engine.model_executor
        driver = getattr(executor, "driver_worker", None)
        return driver.worker.tier_client if driver is not None else None

    @property
    def _running(self) -> Launched:
        if self._launched is None:
            raise EngineError("the engine is closed")
        return self._launched

    def _prepare(
        self, request: Request, max_tokens: int, logprobs: int | None, ignore_eos: bool
    ) -> _Prepared:
        segments = [(segment, self._tokens(segment)) for segment in request.segments]
        tokens = [token for _, ids in segments for token in ids]
        limit = request.max_tokens or max_tokens
        self._check_fits(len(tokens), limit)
        params = self._params(limit, logprobs, ignore_eos)
        tag = self._tag()
        algorithm = self._registry.parse(request.algorithm or self.config.algorithm)
        if self.config.stock:
            if algorithm.spec != self._algorithm.spec:
                raise _not_stock(algorithm.spec)
        else:
            spans = _spans(segments)
            params.extra_args = {"pic": {"spans": spans, "algorithm": algorithm.spec, "tag": tag}}
        prepared = _Prepared(tag, tokens, params, request.salt)
        check_request(self._running.engine.vllm_config, prepared, self._registry)
        return prepared

    def _rehearsal(self) -> Iterator[Request]:
        longest = min(self._running.context, self._running.pool * BLOCK_SIZE // 2) - 2
        tail = min(40, longest)
        yield Request([Text(tokens=(1,) * tail)])
        for chunks, length in ((1, 700), (12, 50)):
            if not self.config.stock and chunks * length + tail <= longest:
                parts = [Chunk(tokens=(i + 1,) * length) for i in range(chunks)]
                yield Request([*parts, Text(tokens=(1,) * tail)])

    def _canonical(self, request: Request) -> "Canonical | None":
        """The first chunk of a request, as the engine's default algorithm compiles it.

        None if that algorithm recomputes all of it: such a chunk has no KV of its own.
        """
        pieces = [Segment(self._tokens(s), isinstance(s, Chunk)) for s in request.segments]
        settings = PicSettings.given(self._running.engine.vllm_config.additional_config)
        assert settings is not None
        layout = settings.layout(self._algorithm, request.salt, BLOCK_SIZE)
        return next(iter(lay_out(pieces, self._algorithm.plan_chunk, layout).canonicals), None)

    def _tokens(self, segment: PromptSegment) -> tuple[int, ...]:
        if segment.tokens is not None:
            return segment.tokens
        return self._tokenizer.encode(segment.text or "")

    def _check_fits(self, prompt: int, limit: int) -> None:
        if not prompt:
            raise ConfigError("a request has no tokens", hint="add a Text or a Chunk")
        if prompt + limit > self._running.context:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {limit} new ones exceed the context of "
                f"{self._running.context}",
                hint="shorten it, lower max_tokens, or raise context (--context)",
            )
        if -(-(prompt + limit) // BLOCK_SIZE) > self._running.pool:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {limit} new ones exceed the pool of "
                f"{self._running.pool} blocks of {BLOCK_SIZE}",
                hint="raise kv_blocks (--kv-blocks)",
            )

    def _params(self, limit: int, logprobs: int | None, ignore_eos: bool) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0,
            max_tokens=limit,
            logprobs=logprobs,
            ignore_eos=ignore_eos,
            stop_token_ids=[] if ignore_eos else self._tokenizer.stops,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _serve(
        self, prepared: Sequence[_Prepared], pace: Pace[_Prepared]
    ) -> "dict[str, tuple[RequestOutput, float]]":
        """Outputs, and how many seconds late each request was submitted, by tag."""
        engine = self._running.engine
        late: dict[str, float] = {}
        done: dict[str, Any] = {}
        try:
            while pace:
                for departure in self._ahead(pace):
                    self._submit(departure)
                    late[departure.item.tag] = departure.late
                if pace.idle:
                    self._running.observer.note()
                    pace.wait()
                    continue
                for output in engine.step():
                    done[output.request_id] = output
                    pace.landed()
        except BaseException:
            self._abort([p.tag for p in prepared if p.tag not in done])
            raise
        return {tag: (output, late[tag]) for tag, output in done.items()}

    def _ahead(self, pace: Pace[_Prepared]) -> Iterator[Departure[_Prepared]]:
        """Requests that go before the next step, one at least: prompts of a few steps' tokens.

        Planning takes milliseconds, in which the device computes the step before. Of many long
        prompts that come at once the first ones start while the others are planned.
        """
        config = self._running.engine.vllm_config.scheduler_config
        room = _STEPS_AHEAD * config.max_num_batched_tokens
        for departure in pace.departures():
            yield departure
            room -= len(departure.item.prompt_token_ids)
            if room <= 0:
                return

    def _abort(self, tags: list[str]) -> None:
        self._running.engine.abort_request(tags)
        for tag in tags:
            self._report(tag)

    def _submit(self, departure: Departure[_Prepared]) -> None:
        prepared = departure.item
        prompt: Any = {"prompt_token_ids": prepared.prompt_token_ids}
        if prepared.cache_salt is not None:
            prompt["cache_salt"] = prepared.cache_salt
        self._running.engine.add_request(
            prepared.tag, prompt, prepared.sampling_params, arrival_time=departure.arrived
        )

    def _result(self, prepared: _Prepared, output: "RequestOutput", late: float) -> Result:
        completion = output.outputs[0]
        counts, hits = self._costs(prepared, output)
        return Result(
            text=self._tokenizer.decode(completion.token_ids),
            tokens=tuple(completion.token_ids),
            prompt_tokens=tuple(prepared.prompt_token_ids),
            timings=_timings(output, len(completion.token_ids), late),
            counts=counts,
            hits=hits,
            finish_reason=_reason(completion),
            logprobs=_logprobs(completion.logprobs),
        )

    def _costs(self, prepared: _Prepared, output: "RequestOutput") -> tuple[TokenCounts, Hits]:
        report = self._report(prepared.tag)
        if report is not None:
            return report.tokens, report.hits
        cached = output.num_cached_tokens or 0
        tokens = TokenCounts(prompt=len(prepared.prompt_token_ids), reused=cached)
        return tokens, Hits(prefix=cached // BLOCK_SIZE)

    def _report(self, tag: str) -> "PromptCost | None":
        linker: Linker | None = getattr(self._running.scheduler, "linker", None)
        return linker.take_cost(tag) if linker else None

    def _tag(self) -> str:
        return f"request-{next(self._numbers)}"


def _spans(segments: Sequence[tuple[PromptSegment, tuple[int, ...]]]) -> list[list[int]]:
    spans, at = [], 0
    for segment, tokens in segments:
        if isinstance(segment, Chunk) and tokens:
            spans.append([at, at + len(tokens)])
        at += len(tokens)
    return spans


def _timings(output: "RequestOutput", generated: int, late: float) -> Timings:
    stats: Any = output.metrics
    if stats is None:
        raise EngineError("vLLM reported no timings")
    decode = stats.last_token_ts - stats.first_token_ts
    return Timings(
        ttft=stats.first_token_latency,
        prefill=stats.first_token_ts - stats.scheduled_ts,
        tpot=decode / (generated - 1) if generated > 1 else None,
        e2e=stats.first_token_latency + decode,
        late=late,
    )


def _reason(completion: Any) -> str | None:
    if completion.stop_reason == REJECTED:
        return "rejected"
    reason: str | None = completion.finish_reason
    return reason


def _logprobs(steps: Any) -> tuple[dict[int, float], ...] | None:
    if steps is None:
        return None
    return tuple({token: entry.logprob for token, entry in step.items()} for step in steps)


def _versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _not_stock(algorithm: str) -> ConfigError:
    return ConfigError(
        f"stock vLLM cannot serve {algorithm!r}",
        hint="stock engines serve 'full' or 'prefix', whichever they were started with",
    )
