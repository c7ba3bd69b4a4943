"""The form of the testbed model's replies, and how the answer is extracted.

The model restates the facts it retrieves ("director of X is Y; home of Y is Z"): a model this small
finds a fact only by continuing its own text.
"""

from collections.abc import Iterable
from types import MappingProxyType

#: The most tokens of a reply: the longest in the rows, with a margin.
MAX_TOKENS = MappingProxyType(
    dict.fromkeys(("musique", "2wikimqa", "hotpotqa"), 80)
    | {"samsum": 96, "multi_news": 192, "needle": 32}
)

_SUMMARIES = ("samsum", "multi_news")
_STEP = "; "
_LINK = " is "


def compose(steps: Iterable[str]) -> str:
    """The reply with these steps; the last one ends with the answer."""
    return _STEP.join(steps)


def extract(reply: str) -> str:
    """The answer in a reply: what follows the last " is " of its first line.

    A reply without " is " is the answer itself.
    """
    line = reply.strip().partition("\n")[0]
    return line.rpartition(_LINK)[2].strip().rstrip(".")


def answer(dataset: str, reply: str) -> str:
    """The text of a reply that is scored: all of a summary, else what `extract` returns."""
    return reply.strip() if dataset in _SUMMARIES else extract(reply)
