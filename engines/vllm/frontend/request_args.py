"""A request's PIC arguments.

A vLLM request describes its chunks by spans of prompt tokens, in `SamplingParams.extra_args`::

    {"pic": {"spans": [[12, 140], [140, 300]], "algorithm": "epic:k=16"}}

or, where only flat values can be sent (`vllm_xargs` over HTTP)::

    {"pic_spans": [12, 140, 140, 300], "pic_algorithm": "epic:k=16"}

Two more say where tokens stand: ``"positions": [[12, 100]]`` gives prompt token 12 the logical
position 100, and the tokens after it those that follow; ``"slots": [[0, 20, 23, 8]]`` says that
tokens 20 to 22 fill a place of 8 positions in the first chunk (flat: ``pic_positions``,
``pic_slots``). A third, ``"dependent": [[140, 156]]`` (flat: ``pic_dependent``), names tokens that
see the whole prompt before them: inside a chunk they are recomputed, elsewhere all tokens do.

With ``context=document`` a request gives the document of a chunk, whole or up to the end of the
chunk, as token ids: ``"documents": [null, [7, 8, ...]]`` has an entry a span, and the flat
``"pic_documents": [0, 2, 7, 8]`` has the length of each document before its ids, 0 for none.

``"usage": true`` (flat: ``pic_usage``) asks what became of the prompt
(`scheduler/usage.py`).

They are parsed once, on arrival, and replaced by a `RequestArgs`. When vLLM sends a request to
another process, msgspec makes that a mapping of the same fields again.
"""

import copy
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from picbench.engines.algorithms import Algorithm, Registry
from picbench.engines.planning.documents import ChunkContexts, Context
from picbench.engines.planning.policy import Segment, Slot
from picbench.engines.request import Chunk, Request
from picbench.engines.vllm.frontend.placements import (
    Position,
    SlotSpan,
    Span,
    documents_of_flat,
    ordered_spans,
    overlapping,
    read_dependent,
    read_documents,
    read_positions,
    read_slots,
    rows_of_flat,
    rows_of_integers,
)
from picbench.errors import ConfigError, closest

ARGS = "pic"

#: At most this many chunks of a prompt are planned.
_MOST_SPANS = 4096

#: What flat arguments begin with; vLLM's other plug-ins have arguments, too.
_PREFIX = "pic_"

#: Flat lists of rows: how many integers each has, and which.
_ROWS = {
    "spans": (2, "start, end, start, end, ..."),
    "positions": (2, "token, position, token, ..."),
    "slots": (4, "chunk, start, end, length, chunk, ..."),
    "dependent": (2, "start, end, start, end, ..."),
}

_FLAT = tuple(_PREFIX + name for name in (*_ROWS, "algorithm", "documents", "usage"))


@dataclass(frozen=True, slots=True)
class RequestArgs:
    """A request's chunks as ``[start, end)`` spans of prompt tokens, and its algorithm, a spec.

    `tag` comes back with the request's cost. `positions` and `slots` say where tokens stand, if not
    one after the other, `documents` what stands before the chunks in theirs. `dependent` spans are
    recomputed under any algorithm. `usage` says whether the answer tells what became of the prompt;
    None leaves that to the server. `names` are ids of the chunks' documents, by span, and `pin` has
    the chunks stay in the pool, as the cache API says. `checked` requests were checked by who sends
    them, in the same process; clients cannot say so.
    """

    spans: tuple[Span, ...]
    algorithm: str | None = None
    tag: str | None = None
    positions: tuple[Position, ...] = ()
    slots: tuple[SlotSpan, ...] = ()
    documents: ChunkContexts = field(default_factory=ChunkContexts)
    dependent: tuple[Span, ...] = ()
    usage: bool | None = None
    names: tuple[str | None, ...] = ()
    pin: bool = False
    checked: bool = False


def request_args(request: Any, registry: Registry) -> RequestArgs | None:
    """A request's arguments, parsed once; None if it has none. Raises what `read_args` does."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    if params is None or prompt is None:
        return None
    found = _parsed(params.extra_args)
    if found is None:
        found = read_args(params.extra_args, prompt, registry)
        if found is not None:
            _keep(request, found)
    return found


def marked_args(
    args: RequestArgs, prompt: Sequence[int], algorithm: Algorithm, block_size: int
) -> RequestArgs:
    """The arguments with the spans that the prompt's own tokens mark, if they name none.

    Raises ConfigError for separators that the algorithm cannot read.
    """
    if args.spans or not algorithm.separators:
        return args
    marks = algorithm.read_marks(prompt, block_size)
    positions = read_positions(args.positions, marks.spans, len(prompt))
    return replace(args, spans=marks.spans, dependent=marks.dependent, positions=positions)


def mark_request(
    request: Any, args: RequestArgs | None, algorithm: Algorithm, block_size: int
) -> RequestArgs | None:
    """A request's arguments, with what its prompt marks; None for a plain prompt without any.

    What was found is kept in the request. Raises what `marked_args` does.
    """
    prompt = request.prompt_token_ids
    if request.sampling_params is None or prompt is None:
        return args
    found = marked_args(args or RequestArgs(()), prompt, algorithm, block_size)
    if not found.spans or found == args:
        return args
    _keep(request, found)
    return found


def add_marked(request: Any, marked: Mapping[str, Any]) -> None:
    """Add the spans, and documents, of a prompt's marks to the arguments that a client sent.

    Raises ConfigError if the client names spans or documents itself.
    """
    params = request.sampling_params
    given = (params and params.extra_args) or {}
    own = given.get(ARGS, {}) if ARGS in given else _unflatten(given)
    if not isinstance(own, Mapping):
        return
    if own.get("spans") or own.get("documents"):
        raise ConfigError(
            "the prompt has marks, and the request names spans or documents",
            hint="leave out pic_spans and pic_documents, or the marks",
        )
    params.extra_args = {**given, ARGS: {**own, **marked}}


def read_args(
    extra_args: Mapping[str, Any] | None, prompt: Sequence[int], registry: Registry
) -> RequestArgs | None:
    """Parse the PIC arguments of a request with the token ids `prompt`; None if it has none.

    Raises ConfigError if spans overlap, are empty, or leave the prompt, if the algorithm is
    unknown, for unknown arguments and values of other types, and as `read_positions`, `read_slots`
    and `read_documents`.
    """
    if not extra_args:
        return None
    flat = [name for name in extra_args if name != ARGS and _is_ours(str(name))]
    _check_names(flat, _FLAT)
    if ARGS in extra_args:
        given = extra_args[ARGS]
        if not isinstance(given, Mapping):
            raise ConfigError(f"extra_args[{ARGS!r}] is {type(given).__name__}, not a mapping")
        _check_names(given, [known.name for known in fields(RequestArgs)], f"{ARGS}: ")
    elif flat:
        given = _unflatten(extra_args)
    else:
        return None
    algorithm, tag = given.get("algorithm"), given.get("tag")
    for name, value in (("algorithm", algorithm), ("tag", tag)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"the {name} is {value!r}, not a string")
    usage = given.get("usage")
    # vLLM's server reads true among flat arguments as 1.
    if usage not in (None, False, True):
        raise ConfigError(f"`usage` is {usage!r}", hint="use true or false")
    if algorithm is not None:
        registry.parse(algorithm)
    hint = "each span is [start, end] in prompt tokens"
    rows = rows_of_integers(given.get("spans", ()), "spans", 2, hint)
    spans = ordered_spans(rows, "spans", len(prompt))
    if len(spans) > _MOST_SPANS:
        raise ConfigError(f"{len(spans):,} spans", hint=f"send at most {_MOST_SPANS:,}")
    return RequestArgs(
        spans,
        algorithm,
        tag,
        read_positions(given.get("positions", ()), spans, len(prompt)),
        read_slots(given.get("slots", ()), spans),
        read_documents(given.get("documents"), spans, prompt),
        read_dependent(given.get("dependent", ()), spans, len(prompt)),
        None if usage is None else bool(usage),
        tuple(given.get("names") or ()),
        given.get("pin") is True,
    )


def flat_args(request: Request, algorithm: str) -> dict[str, str | list[int]]:
    """The flat arguments of a request whose segments are token ids, with their documents."""
    spans: list[int] = []
    documents: list[int] = []
    end = 0
    for segment in request.segments:
        start, end = end, end + len(segment.tokens or ())
        if isinstance(segment, Chunk) and start < end:
            spans += [start, end]
            documents += [len(segment.document or ()), *map(int, segment.document or ())]
    found: dict[str, str | list[int]] = {"pic_algorithm": algorithm, "pic_spans": spans}
    return found | ({"pic_documents": documents} if any(documents) else {})


def parsed_args(request: Any) -> RequestArgs | None:
    """The arguments of a request if they were parsed before."""
    params = request.sampling_params
    return _parsed(params.extra_args) if params is not None else None


def describes_chunks(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request's arguments name spans; they may still be wrong."""
    if not extra_args:
        return False
    if (parsed := _parsed(extra_args)) is not None:
        return bool(parsed.spans)
    given = extra_args.get(ARGS)
    spans = given.get("spans") if isinstance(given, Mapping) else extra_args.get("pic_spans")
    return bool(spans)


def cut(tokens: Sequence[int], args: RequestArgs, placeholder: int) -> list[Segment]:
    """Prompt tokens as segments: the spans are chunks, everything between them is text.

    A text ends where a later token of it has a position. `placeholder` is the token that chunks are
    compiled with in the place of what fills their slots.
    """
    starts, contexts = dict(args.positions), args.documents.contexts()
    tokens = tuple(tokens)
    if not (starts or contexts or args.slots or args.dependent):
        return list(_spans_and_text(tokens, args.spans))
    slots_of = defaultdict[int, list[SlotSpan]](list)
    for slot in args.slots:
        slots_of[slot[0]].append(slot)
    segments: list[Segment] = []
    at = 0
    for index, (start, end) in enumerate((*args.spans, (len(tokens), len(tokens)))):
        cuts = sorted({at, start, *(token for token in range(at + 1, start) if token in starts)})
        for first, last in pairwise(cuts):
            segments.append(Segment(tokens[first:last], position=starts.get(first)))
        if start < end:
            slots = slots_of[index]
            ids, places = _with_placeholders(tokens, (start, end), slots, placeholder)
            context: Context | tuple[int, ...] = (contexts and contexts[index]) or ()
            position = starts.get(start)
            chunk = Segment(ids, chunk=True, position=position, slots=places, context=context)
            dependent = overlapping(args.dependent, start, end)
            segments.append(_with_dependent(chunk, (start, end), slots, dependent))
        at = end
    return segments


def _spans_and_text(tokens: tuple[int, ...], spans: Sequence[Span]) -> Iterator[Segment]:
    """`cut` where nothing is told of chunks but their spans, as of most prompts."""
    at = 0
    for start, end in spans:
        if at < start:
            yield Segment(tokens[at:start])
        yield Segment(tokens[start:end], chunk=True)
        at = end
    if at < len(tokens):
        yield Segment(tokens[at:])


def _with_placeholders(
    tokens: tuple[int, ...], span: Span, slots: Sequence[SlotSpan], placeholder: int
) -> tuple[tuple[int, ...], tuple[Slot, ...]]:
    """A chunk's tokens with placeholders where its slots are, and the slots."""
    if not slots:
        return tokens[slice(*span)], ()
    ids: list[int] = []
    places, at = [], span[0]
    for _, start, end, length in slots:
        ids += tokens[at:start]
        places.append(Slot(len(ids), length, tokens[start:end]))
        ids += (placeholder,) * length
        at = end
    return (*ids, *tokens[at : span[1]]), tuple(places)


def _with_dependent(
    chunk: Segment, span: Span, slots: Sequence[SlotSpan], dependent: Sequence[Span]
) -> Segment:
    """The chunk of a span with its dependent tokens; those that fill slots are computed anyway."""
    indices: list[int] = []
    # Both ascend: slots that end before a token have moved it.
    moved, left = 0, deque(slots)
    for first, last in dependent:
        for token in range(max(span[0], first), min(span[1], last)):
            while left and left[0][2] <= token:
                _, start, end, length = left.popleft()
                moved += length - (end - start)
            if not (left and left[0][1] <= token):
                indices.append(token - span[0] + moved)
    return replace(chunk, dependent=tuple(indices)) if indices else chunk


def _keep(request: Any, found: RequestArgs) -> None:
    """Put parsed arguments in place of those that a request came with."""
    params = request.sampling_params
    # Callers may share one SamplingParams between requests, hence the copy.
    request.sampling_params = copy.copy(params)
    request.sampling_params.extra_args = {**(params.extra_args or {}), ARGS: found}


def _parsed(extra_args: Mapping[str, Any] | None) -> RequestArgs | None:
    found = (extra_args or {}).get(ARGS)
    return found if isinstance(found, RequestArgs) else None


def _is_ours(name: str) -> bool:
    """Whether an argument is one of picbench's, or looks like one that is spelt otherwise.

    vLLM's other plug-ins have arguments, too, so that some letters are not enough.
    """
    folded = _folded(name)
    if f"{folded}_".startswith(_PREFIX):
        return True
    margin = 4 if folded.startswith(ARGS) else 2
    similar = [known for known in _FLAT if abs(len(folded) - len(known)) < margin]
    return bool(get_close_matches(folded, similar, cutoff=0.88))


def _folded(name: str) -> str:
    return re.sub(r"\W", "_", name.lower())


def _check_names(given: Iterable[Any], known: Collection[str], where: str = "") -> None:
    """Raise ConfigError for an argument that is not known: it would be ignored."""
    for name in given:
        if name not in known:
            hint = closest(_folded(str(name))[:99], known)
            raise ConfigError(f"{where}{name!r} is no argument", hint=hint)


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Flat arguments under the names that they have in a mapping."""
    found: dict[str, Any] = {
        name: rows_of_flat(flat.get(_PREFIX + name, ()), _PREFIX + name, *columns)
        for name, columns in _ROWS.items()
    }
    documents = documents_of_flat(flat.get("pic_documents"), "pic_documents")
    plain = {name: flat.get(_PREFIX + name) for name in ("algorithm", "usage")}
    return {**found, **plain, "documents": documents}
