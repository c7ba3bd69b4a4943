"""The input and output of an engine: segments, requests, results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

#: The finish reason of a request that an error ended.
FAILED = "error"


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A run of prompt tokens, given as text, as token ids, or as both (the ids then win).

    `position` is the logical position of the first token; None: it follows the segment before it.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.tokens is None:
            raise ValueError(f"{type(self).__name__} needs text or tokens")
        if self.tokens is not None:
            object.__setattr__(self, "tokens", tuple(self.tokens))


@dataclass(frozen=True, slots=True)
class Text(PromptSegment):
    """Prompt text that belongs to one request: system text, a question."""


@dataclass(frozen=True, slots=True)
class Chunk(PromptSegment):
    """Immutable, reusable content: a document, a dialogue, a code file.

    `slots` (start, end, length) are the places in it that a request fills: tokens [start, end) of
    the chunk are this request's, and stand in a place of `length` positions. Without them, the
    chunk is the same for all requests. `dependent` (start, end) are tokens of the chunk that are
    recomputed with the whole prompt before them in view, besides those that the algorithm
    recomputes. Both need `tokens`.

    `document` is what the chunk was cut from, as text or as token ids: all of it, or all up to the
    end of the chunk, which must be in it (of several places, the last one counts). Algorithms with
    ``context=document`` compile the chunk after what stands before it there, so that its KV knows
    whom "he" and "it" mean. That KV then carries text which the prompt may not show: give only
    documents that every user of the prompt's `salt` may read.
    """

    slots: tuple[tuple[int, int, int], ...] = ()
    dependent: tuple[tuple[int, int], ...] = ()
    document: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super(Chunk, self).__post_init__()
        if self.document is not None and not isinstance(self.document, str):
            object.__setattr__(self, "document", tuple(self.document))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as a sequence of segments; logical order is the order given.

    `algorithm` (``"epic:k=16"``) and `max_tokens` override the engine's defaults for this request.
    Requests with different `salt` (a tenant) never share KV. `logprobs` overrides how many
    log-probabilities a token has in the result.

    With a `reply` these tokens are generated, whatever the model would say; log-probabilities are
    the model's own. The engine needs `forced_replies`.
    """

    segments: Sequence[PromptSegment]
    algorithm: str | None = None
    max_tokens: int | None = None
    salt: str | None = None
    logprobs: int | None = None
    reply: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one request, from its arrival time even if submitted `late` s later.

    `ttft` counts from arrival, `prefill` from the first time the request was scheduled (both end at
    the first token); `tpot` is the mean gap between later tokens (None below two tokens); `e2e` is
    arrival to last token.
    """

    ttft: float
    prefill: float
    tpot: float | None
    e2e: float
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Prompt tokens of a request by origin: `reused`, `compiled` and `computed` are all of them.

    `prompt` tokens were sent by the user. KV of the `reused` ones had not to be computed for this
    request: `loaded` ones came from tiers, by tier, all others were in the pool. `prefix` of them
    follow the prompt's beginning, the others are in chunks, wherever these stand. `compiled` tokens
    are in chunks that were compiled for this request, the first one that needed them. All others
    were computed when it ran, as text or, `linked` ones, inside chunks.

    Beside these, `compile_work` tokens were computed to compile chunks: a chunk that comes twice
    counts once, and what chunks are compiled after counts too. `padded` slots hold no visible
    token. Of stock engines and remote servers `reused` is known, and None where a server does not
    say; only of stock engines `prefix` is, too.
    """

    prompt: int = 0
    reused: int | None = 0
    compiled: int = 0
    linked: int = 0
    padded: int = 0
    prefix: int | None = 0
    compile_work: int = 0
    loaded: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def plain(cls, prompt: int, cached: int) -> Self:
        """Of a request without a plan, of which prefix caching found `cached` tokens."""
        return cls(prompt, reused=cached, prefix=cached)

    @property
    def computed(self) -> int | None:
        """Prompt tokens that were computed when the request ran; None if that is unknown."""
        return None if self.reused is None else self.prompt - self.reused - self.compiled


@dataclass(frozen=True, slots=True)
class Hits:
    """Reused KV blocks of one request by kind.

    `chunk` are canonical blocks that it shares, `prefix` prefix-keyed ones, `copied` its own copies
    of canonical blocks. `tiers` are the blocks that were loaded for it, by tier: shared ones
    or its copies.
    """

    chunk: int = 0
    prefix: int = 0
    copied: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a request under `auto` was served: of its `chunks`, those at the indices `texts` as text.

    Its first token was `expected` after so many seconds, were it alone; None where there was no
    choice, as for chunks with positions or slots.
    """

    chunks: int
    texts: tuple[int, ...] = ()
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a request. `logprobs` has one {token id: logprob} a generated token.

    `finish_reason` is vLLM's, or ``"rejected"`` for a request that `on_pressure` refused: it has no
    tokens, and its timings say when it was answered. A request that an error ended has the reason
    ``"error"`` and one line in `error`, as has a rejected one. `choice` is set under `auto`.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    timings: Timings
    counts: TokenCounts
    hits: Hits
    finish_reason: str | None = None
    logprobs: tuple[dict[int, float], ...] | None = field(default=None, repr=False)
    error: str | None = None
    choice: Choice | None = None
