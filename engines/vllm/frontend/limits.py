"""Checks on arrival whether a request can be served at all."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from picbench.engines.algorithms import Algorithm, Registry, Reuse, check_served
from picbench.engines.planning.documents import ChunkContexts
from picbench.engines.planning.layout import Footprint, measure
from picbench.engines.planning.policy import LayoutConfig
from picbench.engines.vllm.frontend.request_args import (
    RequestArgs,
    cut,
    describes_chunks,
    mark_request,
    request_args,
)
from picbench.engines.vllm.settings import FORCED_TOKENS, PicSettings
from picbench.errors import ConfigError

#: What users of vLLM can do about a pool that is too small.
_MORE_BLOCKS = (
    "send fewer tokens or chunks, or start vLLM with more: --num-gpu-blocks-override, "
    "--kv-cache-memory-bytes or --gpu-memory-utilization"
)

#: What limits count, and how a prompt gets by with fewer positions.
_SLOTS, _ALL_SLOTS = "KV slots with pads", "KV slots with pads, linked and generated tokens"
_POSITIONS = "positions with pads and generated tokens"
_FEWER = "send fewer chunks, or use pad=masked"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one request may need.

    `capacity` is in KV slots, `positions` in logical positions, which RoPE's table ends with, and
    `blocks` in blocks of the whole pool; `more_blocks` says how to get more of these. `layers` are
    the model's.
    """

    capacity: int
    positions: int
    blocks: int
    block_size: int
    layers: int
    more_blocks: str = _MORE_BLOCKS

    @classmethod
    def of(cls, config: Any, more_blocks: str = _MORE_BLOCKS) -> Self:
        """The limits of an engine, from its `VllmConfig`."""
        cache = config.cache_config
        # vLLM reserves block 0.
        blocks = cache.num_gpu_blocks - 1
        capacity = config.model_config.max_model_len
        settings = PicSettings.given(config.additional_config)
        positions = settings.positions if settings else None
        layers = config.model_config.get_total_num_hidden_layers()
        positions = positions or capacity
        return cls(capacity, positions, blocks, cache.block_size, layers, more_blocks)

    def check(self, footprint: Footprint, max_tokens: int) -> int:
        """Blocks that a request needs to finish, compiles included.

        Raises ConfigError if pool or context are too small for it, or the model lacks a check
        layer.
        """
        if footprint.compares and self.layers < 2:
            raise ConfigError(
                "the algorithm compares KV at the second layer, and the model has one layer",
                hint="use a model with more layers, or cacheblend:select=first",
            )
        slots, end = footprint.slots + max_tokens, footprint.end + max_tokens
        need = -(-slots // self.block_size) + footprint.spare
        if need > self.blocks:
            raise ConfigError(
                f"the request needs {need} KV blocks, the pool has {self.blocks}",
                hint=self.more_blocks,
            )
        room, context = "the engine has room for {} a request", "the context has {}"
        compiled = "a chunk and the text that it is compiled after"
        shorter = "or use a shorter anchor or document"
        for does, needed, units, most, has, hint in (
            ("the prompt needs", slots, _ALL_SLOTS, self.capacity, room, "or send fewer chunks"),
            (f"{compiled} have", footprint.compile_end, "tokens", self.positions, context, shorter),
            # A compile samples a token, which is dropped; vLLM ends no request without room for it.
            (f"{compiled} need", footprint.compile_slots + 1, _SLOTS, self.capacity, room, shorter),
            ("the prompt needs", end, _POSITIONS, self.positions, context, _FEWER),
        ):
            if needed > most:
                what = f"{does} {needed} {units}; {has.format(most)}"
                raise ConfigError(what, hint=f"raise `context` (vLLM: max_model_len), {hint}")
        return need

    def room(self, footprint: Footprint) -> int:
        """Tokens that a request can generate before it needs more than a request may have."""
        blocks = self.blocks - footprint.spare
        slots = min(self.capacity, blocks * self.block_size) - footprint.slots
        return min(slots, self.positions - footprint.end)


def check_request(
    config: Any,
    request: Any,
    registry: Registry,
    *,
    shorten: bool = False,
    more_blocks: str = _MORE_BLOCKS,
) -> None:
    """Raise ConfigError for a request that an engine must not be given.

    `config` is the engine's `VllmConfig`, `request` an `EngineCoreRequest`. Refused are requests
    with chunks if the engine runs without picbench, malformed or too large ones, and those that ask
    for what vLLM derives from the order of the prompt's tokens. With `shorten`, a request that may
    generate up to the end of the context gets `max_tokens` that fit besides pads and linked tokens;
    vLLM's servers give chat requests without `max_tokens` the whole context. `more_blocks` says how
    the caller gets a larger pool.
    """
    args = request_args(request, registry)
    if args is not None and args.checked:
        return
    settings = PicSettings.given(config.additional_config)
    if settings is not None:
        algorithm = registry.parse((args and args.algorithm) or settings.algorithm)
        check_served(algorithm)
        _check_vocabulary(config, algorithm.separators, f"{algorithm.spec} reads")
        args = mark_request(request, args, algorithm, config.cache_config.block_size)
    if args is None:
        params = request.sampling_params
        if params is not None and describes_chunks(params.extra_args):
            raise ConfigError("a prompt of embeddings has no chunks", hint="send tokens or text")
        return
    if settings is None:
        raise ConfigError(
            "the request describes chunks, but this engine was started without picbench: it would "
            "be served without reuse",
            hint="start it with picbench's scheduler_cls, worker_cls and additional_config",
        )
    if algorithm.reuse is not Reuse.CHUNKS and (args.positions or args.slots):
        raise ConfigError(
            f"{algorithm.spec} serves prompts without positions and slots",
            hint="use an algorithm that reuses chunks, such as prompt-cache",
        )
    if args.positions and not args.spans:
        raise ConfigError("a prompt without chunks has no positions", hint="name its chunks")
    if algorithm.reuse is Reuse.CHUNKS and args.spans:
        _check_features(config, request)
        limits = Limits.of(config, more_blocks)
        layout = settings.layout(algorithm, request.cache_salt, limits.block_size)
        footprint = _footprint(config, request.prompt_token_ids, args, algorithm, layout, limits)
        if shorten:
            _shorten(request, limits.capacity, limits.room(footprint))
        limits.check(footprint, request.sampling_params.max_tokens or 1)


def _footprint(
    config: Any,
    prompt: Sequence[int],
    args: RequestArgs,
    algorithm: Algorithm,
    layout: LayoutConfig,
    limits: Limits,
) -> Footprint:
    """What a prompt with chunks needs. Raises ConfigError for one that cannot be arranged."""
    # Both are counted before they are made: segments have a token for each place of a slot.
    length, added = sum(slot[3] for slot in args.slots), algorithm.added(len(args.spans))
    if length > limits.positions:
        raise ConfigError(
            f"slots of {length} positions; the context has {limits.positions}",
            hint="raise `context` (vLLM: max_model_len), or give slots fewer positions",
        )
    if added > limits.capacity:
        raise ConfigError(
            f"{algorithm.spec} adds {added} tokens to the prompt; the engine has room for "
            f"{limits.capacity} KV slots a request",
            hint="lower the option, or send fewer chunks",
        )
    given = cut(prompt, args, layout.pad_token)
    _check_ids(args.documents, config.model_config.get_vocab_size())
    try:
        segments = algorithm.arrange(given, layout)
        tokens = {token for segment in segments for token in segment.added}
        _check_vocabulary(config, tokens, f"{algorithm.spec} adds")
        return measure(segments, algorithm.plan_chunk, layout)
    except ValueError as error:
        raise ConfigError(f"{algorithm.spec}: {error}", hint="use another algorithm") from error


def _check_vocabulary(config: Any, tokens: Collection[int], does: str) -> None:
    """Raise ConfigError if an algorithm names a token that the model does not have."""
    if not tokens:
        return
    vocabulary = config.model_config.get_vocab_size()
    if max(tokens) >= vocabulary:
        raise ConfigError(
            f"{does} token {max(tokens)}, the model has {vocabulary}",
            hint="give token ids of the model's vocabulary",
        )


def _check_ids(documents: ChunkContexts, vocabulary: int) -> None:
    """Raise ConfigError for an id that the model does not have; vLLM checks only the prompt."""
    ids = np.frombuffer(documents.ids, "<i4")
    if not ids.size or ids.max() < vocabulary:
        return
    for index, (start, end) in enumerate(documents.places):
        largest = ids[start:end].max(initial=0)
        if largest >= vocabulary:
            raise ConfigError(
                f"documents[{index}] has token id {largest}, the model has {vocabulary}",
                hint="send the ids of the served model's tokenizer",
            )


def _shorten(request: Any, capacity: int, room: int) -> None:
    """Lower `max_tokens` to `room` if it reaches the end of the context of `capacity`."""
    params = request.sampling_params
    if params.max_tokens != capacity - len(request.prompt_token_ids):
        return
    if room < params.min_tokens:
        raise ConfigError(
            f"with pads and linked tokens there is room for {room} tokens, min_tokens is "
            f"{params.min_tokens}",
            hint="lower min_tokens, or raise `context` (vLLM: max_model_len)",
        )
    params.max_tokens = max(1, min(params.max_tokens, room))


def _check_features(config: Any, request: Any) -> None:
    """Raise ConfigError for what vLLM derives from the prompt's tokens in their order."""
    params = request.sampling_params
    if params.skip_reading_prefix_cache or params.prompt_logprobs is not None:
        raise ConfigError(
            "a request with chunks cannot skip the cache",
            hint="leave prompt_logprobs and skip_reading_prefix_cache off",
        )
    processors = {*(config.model_config.logits_processors or ())} - {FORCED_TOKENS}
    unsupported = {
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None,
        "thinking_token_budget": params.thinking_token_budget is not None,
        "streaming input": getattr(request, "resumable", False),
        "an engine with custom logits processors": bool(processors),
    }
    for feature, asked in unsupported.items():
        if asked:
            raise ConfigError(
                f"a request with chunks cannot be served with {feature}",
                hint="its prompt is computed in another order; send it without chunks",
            )
