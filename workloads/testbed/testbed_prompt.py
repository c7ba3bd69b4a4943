"""Prompts of the testbed, from the data sets' own templates."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from picbench.workloads.datasets.base import Dataset
from picbench.workloads.datasets.hotpotqa import HotpotQA
from picbench.workloads.datasets.multi_news import MultiNews
from picbench.workloads.datasets.musique import MuSiQue
from picbench.workloads.datasets.needle import Needle
from picbench.workloads.datasets.samsum import SAMSum
from picbench.workloads.datasets.wikimqa import WikiMQA
from picbench.workloads.prompts.segmentation import Counter

# Listed here instead of found by entry points, so that training works from a checkout.
_DATASETS: MappingProxyType[str, Dataset] = MappingProxyType(
    {
        made.name: made
        for made in (MuSiQue(), WikiMQA(), HotpotQA(), SAMSum(), MultiNews(), Needle())
    }
)


class Prompt(NamedTuple):
    """The text of a prompt: before the chunks, the chunks, after them."""

    head: str
    chunks: Sequence[str]
    tail: str


def dataset(name: str) -> Dataset:
    """The data set whose template, chunks and score the rows called `name` use."""
    return _DATASETS[name]


def prompt(name: str, context: str, question: str, count: Counter) -> Prompt:
    """Render a row; `count` counts tokens, for contexts that are cut by tokens."""
    head, tail = dataset(name).template.render(question)
    return Prompt(head, dataset(name).split(context, count), tail)
