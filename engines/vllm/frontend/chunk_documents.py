"""The documents of a request's chunks, as token ids that come from JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from picbench.engines.planning.documents import ChunkContexts, pack_ids, preceding
from picbench.engines.vllm.frontend.lists import is_integer, is_list
from picbench.engines.vllm.frontend.placements import Span
from picbench.errors import ConfigError


def read_documents(given: Any, spans: Sequence[Span], prompt: Sequence[int]) -> ChunkContexts:
    """What stands before each span in its document.

    Documents come from users as lists of token ids, from another process as `ChunkContexts`. Raises
    ConfigError for values that are neither, for too many or too few documents, and for one that
    does not contain its chunk.
    """
    if given is None:
        return ChunkContexts()
    if isinstance(given, Mapping):
        found = ChunkContexts.sent(given, len(spans))
        if found is None:
            raise ConfigError("documents are a mapping", hint="send a list of token ids a span")
        return found
    if not is_list(given) or len(given) not in (0, len(spans)):
        raise ConfigError(
            f"documents has no entry for each of the {len(spans)} spans",
            hint="one list of token ids a span, null for a chunk without a document",
        )
    pairs = enumerate(zip(given, spans, strict=False))
    return ChunkContexts.of(
        [_context(n, document, prompt[slice(*span)]) for n, (document, span) in pairs]
    )


def documents_of_flat(flat: Any, name: str) -> list[Any] | None:
    """A flat list as documents, each after its length; None for None.

    Raises ConfigError for lengths that do not add up to the list's.
    """
    if flat is None:
        return None
    documents: list[Any] = []
    at = 0
    while is_list(flat) and at < len(flat) and is_integer(flat[at]) and flat[at] >= 0:
        length = int(flat[at])
        documents.append(flat[at + 1 : at + 1 + length])
        at += 1 + length
    if not is_list(flat) or at != len(flat):
        raise ConfigError(
            f"{name} needs the length of each document and then its token ids",
            hint="0 for a chunk without a document: 0, 3, 7, 8, 9, ...",
        )
    return documents


def _context(index: int, given: Any, chunk: Sequence[int]) -> bytes:
    if given is None:
        return b""
    document = pack_ids(given) if is_list(given) and _are_integers(given) else None
    if document is None:
        raise ConfigError(
            f"documents[{index}] is no list of token ids",
            hint="the token ids of the text that contains the chunk",
        )
    if not document:
        return document
    packed = pack_ids(chunk)
    found = None if packed is None else preceding(document, packed)
    if found is None:
        raise ConfigError(
            f"documents[{index}] does not contain its chunk, spans[{index}]",
            hint="a document has the chunk's own token ids after those of the text before it",
        )
    return found


def _are_integers(given: Sequence[Any]) -> bool:
    # Documents are long and nearly always lists of int, which is seen fastest like this.
    return set(map(type, given)) <= {int} or all(map(is_integer, given))
