"""What the testbed model says, and how its answer is read out of it.

The model restates what it looks up ("director of X is Y; home of Y is Z"): a model this small
finds a fact by continuing its own words, and cannot answer otherwise.
"""

from collections.abc import Iterable
from types import MappingProxyType

#: How many tokens a reply may have: the longest in the rows, and some room.
MAX_TOKENS = MappingProxyType(
    {
        "musique": 80,
        "2wikimqa": 80,
        "hotpotqa": 80,
        "samsum": 96,
        "multi_news": 192,
        "needle": 32,
    }
)

_SUMMARIES = ("samsum", "multi_news")
_STEP = "; "
_LINK = " is "


def compose(steps: Iterable[str]) -> str:
    """The reply that takes these steps; the last one ends with the answer."""
    return _STEP.join(steps)


def extract(reply: str) -> str:
    """The answer in a reply: what follows the last " is " of its first line.

    A reply that restates nothing is its own answer.
    """
    line = reply.strip().partition("\n")[0]
    return line.rpartition(_LINK)[2].strip().rstrip(".")


def answer(dataset: str, reply: str) -> str:
    """The part of a reply that is scored: all of a summary, else what `extract` reads."""
    return reply.strip() if dataset in _SUMMARIES else extract(reply)
