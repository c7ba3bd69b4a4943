"""Requests in vLLM's terms, and results from vLLM's outputs."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from picbench.dummy_prefix import inside_prompt
from picbench.engines.algorithms import (
    Algorithm,
    Registry,
    Reuse,
    check_served,
    find_tokens,
    parse,
)
from picbench.engines.config import BLOCK_SIZE, EngineConfig
from picbench.engines.planning.documents import ChunkContexts, pack_ids, preceding
from picbench.engines.planning.layout import lay_out
from picbench.engines.request import (
    FAILED,
    Chunk,
    Hits,
    PromptSegment,
    Request,
    Result,
    Timings,
    TokenCounts,
)
from picbench.engines.vllm.frontend.limits import check_request
from picbench.engines.vllm.frontend.placements import (
    Position,
    SlotSpan,
    Span,
    read_dependent,
    read_positions,
    read_slots,
)
from picbench.engines.vllm.frontend.request_args import ARGS, RequestArgs, cut, marked_args
from picbench.engines.vllm.launch import Launched
from picbench.engines.vllm.settings import REJECTED, REPLY, PicSettings
from picbench.errors import ConfigError, EngineError, check_counts

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from picbench.engines.planning.plan import Canonical
    from picbench.engines.vllm.scheduler.prompt_cost import PromptCost


class ModelTokenizer:
    """Text to token ids and back, by the tokenizer of a model folder or hub id."""

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, text: str, *, after: Iterable[int] | None = None) -> tuple[int, ...]:
        """Token ids of a text, without special tokens. Raises ConfigError without tokenizer.

        `after` are the tokens before it in its prompt (None: any). Where they are but special ones,
        it gets the dummy prefix of tokenizers that have one.
        """
        if self._loaded is None:
            raise ConfigError(
                f"model {self._model!r} has no tokenizer", hint="give segments as token ids"
            )
        special = self._loaded.all_special_ids
        first = after is not None and all(token in special for token in after)
        tokenizer = self._loaded if first else self._inside
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, without special ones; empty for a model without tokenizer."""
        if self._loaded is None:
            return ""
        return str(self._loaded.decode(list(tokens), skip_special_tokens=True))

    def complete(self, config: EngineConfig) -> EngineConfig:
        """The settings with the tokens of anchors' texts. Raises ConfigError as `find_tokens`."""
        if config.stock:
            return config
        encode = None if self._loaded is None else self.encode
        named = parse(config.algorithm).anchor_text
        return replace(config, anchors=find_tokens(config.anchors, named, encode))

    @cached_property
    def stops(self) -> list[int]:
        """Tokens that end a generation, from the model's generation settings."""
        from transformers import AutoConfig, GenerationConfig

        try:
            config: Any = GenerationConfig.from_pretrained(self._model)
        except OSError:
            config = AutoConfig.from_pretrained(self._model)
        stops = config.eos_token_id
        if stops is None:
            return []
        return list(stops) if isinstance(stops, list) else [int(stops)]

    @cached_property
    def _inside(self) -> Any:
        return inside_prompt(self._loaded)

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._model, model_max_length=sys.maxsize)
        except (OSError, ValueError):
            return None


#: What users of an `Engine` can do about a pool that is too small.
_MORE_BLOCKS = "raise `kv_blocks`"

#: Segments and their tokens.
_Tokenized = Sequence[tuple[PromptSegment, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request under vLLM's names; `tag` is its id, in vLLM and in the engine's reports."""

    tag: str
    prompt_token_ids: list[int]
    sampling_params: "SamplingParams"
    cache_salt: str | None


class RequestPreparer:
    """Tokenizes and checks requests. Raises ConfigError if the engine's algorithm is wrong."""

    def __init__(self, config: EngineConfig, tokenizer: ModelTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._registry = Registry()
        self._algorithm = self._registry.parse(config.algorithm)
        self._numbers = count()
        check_served(self._algorithm)
        if config.stock and self._algorithm.reuse is Reuse.CHUNKS:
            raise _not_stock(config.algorithm)

    def prepare(
        self,
        request: Request,
        running: Launched,
        max_tokens: int,
        logprobs: int | None,
        ignore_eos: bool,
    ) -> PreparedRequest:
        """Raises ConfigError for a request that the engine can never serve."""
        segments, tokens = self._tokenized(request)
        limit = max_tokens if request.max_tokens is None else request.max_tokens
        logprobs = logprobs if request.logprobs is None else request.logprobs
        if request.reply is not None:
            self._check_reply(request.reply)
            limit, ignore_eos = len(request.reply), True
        check_counts(max_tokens=limit)
        _check_fits(len(tokens), limit, running)
        _check_ids([*tokens, *(request.reply or ())], running)
        most = running.engine.vllm_config.model_config.max_logprobs
        if logprobs is not None and (logprobs < 0 or 0 <= most < logprobs):
            message = f"`logprobs` {logprobs}: an engine gives 0 to {most}"
            raise ConfigError(message, hint="ask for fewer")
        params = self._params(limit, logprobs, ignore_eos)
        if request.reply is not None:
            _force(params, request.reply, running)
        elif self._config.stock:
            params.skip_reading_prefix_cache = self._algorithm.reuse is Reuse.NOTHING
        tag = f"request-{next(self._numbers)}"
        named = request.algorithm
        algorithm = self._registry.parse(self._config.algorithm if named is None else named)
        args = self._args(segments, algorithm, tag)
        if self._config.stock:
            if args.positions or args.slots:
                raise ConfigError("stock vLLM has no positions", hint="leave `position` out")
            if algorithm.spec != self._algorithm.spec:
                raise _not_stock(algorithm.spec)
        else:
            args = marked_args(args, tokens, algorithm, BLOCK_SIZE)
            extra = params.extra_args or {}
            params.extra_args = {**extra, ARGS: args}
        prepared = PreparedRequest(tag, tokens, params, request.salt)
        config = running.engine.vllm_config
        check_request(config, prepared, self._registry, more_blocks=_MORE_BLOCKS)
        if not self._config.stock:
            # vLLM's frontend, which is in this process, checks it as it is submitted.
            params.extra_args = {**extra, ARGS: replace(args, checked=True)}
        return prepared

    def canonical(self, request: Request, running: Launched) -> "Canonical | None":
        """The first chunk as the default algorithm compiles it; None if it recomputes all of it."""
        segments, tokens = self._tokenized(request)
        settings = PicSettings.given(running.engine.vllm_config.additional_config)
        assert settings is not None
        layout = settings.layout(self._algorithm, request.salt, BLOCK_SIZE)
        given = cut(tokens, self._args(segments, self._algorithm), layout.pad_token)
        planned = self._algorithm.arrange(given, layout)
        return next(iter(lay_out(planned, self._algorithm.plan_chunk, layout).canonicals), None)

    def _tokenized(self, request: Request) -> tuple[_Tokenized, list[int]]:
        segments, tokens = [], list[int]()
        for segment in request.segments:
            ids = segment.tokens
            if ids is None:
                ids = self._tokenizer.encode(segment.text or "", after=tokens)
            segments.append((segment, ids))
            tokens += ids
        return segments, tokens

    def _args(
        self, segments: _Tokenized, algorithm: Algorithm, tag: str | None = None
    ) -> RequestArgs:
        args = _args(segments, algorithm.spec, tag)
        chunks = [(s, tokens) for s, tokens in segments if isinstance(s, Chunk) and tokens]
        if not algorithm.documents or all(chunk.document is None for chunk, _ in chunks):
            return args
        pairs = enumerate(chunks, start=1)
        contexts = ChunkContexts.of([self._context(n, *chunk) for n, chunk in pairs])
        return replace(args, documents=contexts)

    def _context(self, number: int, chunk: Chunk, tokens: tuple[int, ...]) -> bytes:
        """What stands before a chunk in its document, packed."""
        document, found = chunk.document, None
        if document is None:
            return b""
        if not isinstance(document, str):
            packed, own = pack_ids(document), pack_ids(tokens)
            if packed is not None and own is not None:
                found = preceding(packed, own)
        elif chunk.text is not None and (at := document.rfind(chunk.text)) >= 0:
            # The text before the chunk is tokenized alone, so that the chunk keeps its tokens.
            found = pack_ids(self._tokenizer.encode(document[:at]))
        if found is None:
            raise ConfigError(
                f"chunk {number} of the request is not in its document",
                hint="`document` is the text, or the token ids, that the chunk was cut from",
            )
        return found

    def _params(self, limit: int, logprobs: int | None, ignore_eos: bool) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        try:
            return SamplingParams(
                temperature=0,
                max_tokens=limit,
                logprobs=logprobs,
                ignore_eos=ignore_eos,
                stop_token_ids=[] if ignore_eos else self._tokenizer.stops,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # made for this request
            )
        except (ValueError, VLLMClientError) as error:
            raise ConfigError(str(error), hint="see `max_tokens` and `logprobs`") from error

    def _check_reply(self, reply: Sequence[int]) -> None:
        if not self._config.forced_replies:
            raise ConfigError(
                "a request has a `reply`, and this engine has `forced_replies` off",
                hint="start it with `forced_replies=True`",
            )
        if not reply:
            raise ConfigError("`reply` has no token", hint="leave it out, or give a token")


def make_result(
    prepared: PreparedRequest,
    output: "RequestOutput",
    late: float,
    cost: "PromptCost | None",
    tokenizer: ModelTokenizer,
) -> Result:
    """The result of a request that was submitted `late` seconds after it was due.

    `cost` is the linker's account of a request with chunks; without one, vLLM's counts of cached
    tokens are used. Raises EngineError if vLLM reported no timings.
    """
    completion: Any = output.outputs[0]
    cached = output.num_cached_tokens or 0
    rejected = completion.stop_reason == REJECTED
    failed, steps = completion.finish_reason == FAILED, completion.logprobs
    return Result(
        text=tokenizer.decode(completion.token_ids),
        tokens=tuple(completion.token_ids),
        prompt_tokens=tuple(prepared.prompt_token_ids),
        timings=_timings(output, len(completion.token_ids), late),
        counts=cost.tokens if cost else TokenCounts.plain(len(prepared.prompt_token_ids), cached),
        hits=cost.hits if cost else Hits(prefix=cached // BLOCK_SIZE),
        choice=cost.choice if cost else None,
        finish_reason="rejected" if rejected else completion.finish_reason,
        logprobs=None if steps is None else tuple(map(_logprobs_of, steps)),
        error=str(completion.stop_reason or "no reason given") if failed else None,
    )


def _check_fits(prompt: int, limit: int, running: Launched) -> None:
    if not prompt:
        raise ConfigError("a request has no tokens", hint="add a Text or a Chunk")
    length = f"a prompt of {prompt} tokens and {limit} new ones"
    if prompt + limit > running.context:
        raise ConfigError(
            f"{length} exceed the context of {running.context}",
            hint="shorten it, lower `max_tokens`, or raise `context`",
        )
    if -(-(prompt + limit) // BLOCK_SIZE) > running.pool:
        raise ConfigError(
            f"{length} exceed the pool of {running.pool} blocks of {BLOCK_SIZE}",
            hint=_MORE_BLOCKS,
        )


def _check_ids(tokens: Sequence[int], running: Launched) -> None:
    """Raise ConfigError for ids that the model does not have: they would fail a whole step."""
    size = running.engine.vllm_config.model_config.get_vocab_size()
    try:
        ids = np.frombuffer(array("q", tokens), np.int64)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"token ids: {error}", hint=f"give integers below {size}") from error
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise ConfigError(
            f"token id {wrong} is not in the vocabulary of {size}",
            hint="tokenize with the model's own tokenizer",
        )


def _force(params: "SamplingParams", reply: Sequence[int], running: Launched) -> None:
    if running.engine.vllm_config.model_config.enable_trace_replay:
        params.trace_decode_token_ids = list(reply)
    else:
        params.extra_args = {REPLY: list(reply)}


def _args(segments: _Tokenized, algorithm: str, tag: str | None) -> RequestArgs:
    spans: list[Span] = []
    positions: list[Position] = []
    slots: list[SlotSpan] = []
    dependent: list[Span] = []
    at = 0
    for segment, tokens in segments:
        if tokens and segment.position is not None:
            positions.append((at, segment.position))
        if isinstance(segment, Chunk) and tokens:
            slots += [(len(spans), at + b, at + e, length) for b, e, length in segment.slots]
            dependent += [(at + b, at + e) for b, e in segment.dependent]
            spans.append((at, at + len(tokens)))
        at += len(tokens)
    return RequestArgs(
        tuple(spans),
        algorithm,
        tag,
        positions=read_positions(positions, spans, at),
        slots=read_slots(slots, spans),
        dependent=read_dependent(dependent, spans, at),
    )


def _not_stock(algorithm: str) -> ConfigError:
    return ConfigError(
        f"stock vLLM cannot serve {algorithm!r}",
        hint="stock engines serve 'full' or 'prefix', whichever they were started with",
    )


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


def _logprobs_of(step: Any) -> dict[int, float]:
    return {token: entry.logprob for token, entry in step.items()}
