"""The documents of a request's chunks, as token ids that come from JSON."""

from collections.abc import Sequence
from typing import Any

from picbench.engines.planning.documents import upto
from picbench.engines.vllm.frontend.lists import is_integer, is_list
from picbench.engines.vllm.frontend.placements import Span
from picbench.errors import ConfigError


def read_documents(
    given: Any, spans: Sequence[Span], prompt: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """For each span its document up to the chunk's end, empty for none; nothing if none is given.

    Raises ConfigError for documents that are no lists of token ids, too many or too few of them,
    and for one that does not contain its chunk.
    """
    if given is None:
        return ()
    if not is_list(given) or len(given) not in (0, len(spans)):
        raise ConfigError(
            f"documents has no entry for each of the {len(spans)} spans",
            hint="one list of token ids a span, null for a chunk without a document",
        )
    pairs = enumerate(zip(given, spans, strict=False))
    return tuple(_document(n, document, prompt[slice(*span)]) for n, (document, span) in pairs)


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


def _document(index: int, given: Any, chunk: Sequence[int]) -> tuple[int, ...]:
    if given is None:
        return ()
    if not is_list(given) or not _are_ids(given):
        raise ConfigError(
            f"documents[{index}] is no list of token ids",
            hint="the token ids of the text in which the chunk stands",
        )
    found = upto(given, chunk) if given else ()
    if found is None:
        raise ConfigError(
            f"documents[{index}] does not contain its chunk, spans[{index}]",
            hint="a document has the chunk's own token ids after those of the text before it",
        )
    return found


def _are_ids(given: Sequence[Any]) -> bool:
    # Documents are long and nearly always lists of int, which is seen fastest like this.
    integers = set(map(type, given)) <= {int} or all(map(is_integer, given))
    return integers and (not given or (min(given) >= 0 and max(given) < 1 << 31))
