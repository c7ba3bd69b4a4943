"""Where a chunk stands in its document. Nothing here imports torch or vllm."""

from array import array
from collections.abc import Sequence

_ITEM = "q"


def upto(document: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...] | None:
    """The token ids of a document up to the end of a chunk; None if it is not in there.

    Of several places it is the last one, so that a caller who means another cuts the document off
    after that.
    """
    size = len(chunk)
    if tuple(document[-size:]) == tuple(chunk):
        return tuple(document)
    text, part = array(_ITEM, document).tobytes(), array(_ITEM, chunk).tobytes()
    width = array(_ITEM).itemsize
    at = text.rfind(part)
    # Bytes may also agree in the middle of an id.
    while at > 0 and at % width:
        at = text.rfind(part, 0, at + len(part) - 1)
    return tuple(document[: at // width + size]) if at >= 0 else None
