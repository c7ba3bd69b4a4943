"""Which algorithms are compared on which model."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from picbench.engines.algorithms import Registry
from picbench.errors import ConfigError
from picbench.names import closest

#: Recompute nothing of a chunk's KV but what the algorithm says; all others are compared with it.
FULL = "full"

#: MEPIC with one block a chunk: what an arm of ours may link at most to count as cheap.
MEPIC = "mepic"

#: Published algorithms, and options of theirs.
PUBLISHED = (
    FULL,
    "prefix",
    "naive",
    *(f"epic:k={k}" for k in (0, 1, 2, 4, 8, 16, 32, 64)),
    "epic:k=16:bos=chunk",
    *(f"cacheblend:r={r}" for r in (0.05, 0.15, 0.3, 0.5)),
    "cacheblend:r=0.15:select=first",
    MEPIC,
    "mepic:blocks=2",
    "mepic:pad=paper",
    "minipic",
    "block-attention",
    "prompt-cache",
    "kvlink:n=5",
)

#: picbench's own: chunks that know their documents, the prompt's first text, or the question. As
#: all arms here they are canonical specs.
OWN = (
    "naive:context=document",
    "naive:anchored=on",
    "naive:anchored=on:context=document",
    "epic:k=16:context=document",
    "mepic:context=document",
    "mepic:anchored=on",
    "mepic:anchored=on:context=document",
    "mepic:select=question",
    "mepic:anchored=on:context=document:select=question",
)

_WITH_TUNED = (FULL, "naive", MEPIC, "naive:context=document", "mepic:anchored=on:context=document")

#: Arms by model. The tuned models serve what they were tuned for, and a few arms beside it.
ARMS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "testbed": (*PUBLISHED, *OWN),
        "testbed:block": (*_WITH_TUNED, "block-attention"),
        "testbed:link": (*_WITH_TUNED, "kvlink:n=5"),
    }
)

#: Arms where the retriever left the lead passage out, on the testbed model.
DROP_ARMS = (
    FULL,
    "naive",
    MEPIC,
    "naive:context=document",
    "mepic:context=document",
    "naive:anchored=on:context=document",
    "mepic:anchored=on:context=document",
)

#: The data sets that have such passages.
DROP_DATASETS = ("musique", "2wikimqa", "hotpotqa")


def arms_of(model: str, *, drop: bool = False, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The canonical specs of a model's arms, or of those in `only`, among them always `full`.

    Raises ConfigError for a model that has none, and for an algorithm that does not exist.
    """
    if only:
        registry = Registry()
        return tuple(dict.fromkeys((FULL, *(registry.parse(spec).spec for spec in only))))
    if model not in ARMS_OF:
        raise ConfigError(f"`model` {model}: not a testbed", hint=closest(model, ARMS_OF))
    return DROP_ARMS if drop else ARMS_OF[model]


def labels(arms: Iterable[str]) -> dict[str, str]:
    """What tables call arms."""
    registry = Registry()
    return {arm: registry.parse(arm).label for arm in arms}
