"""The base of the multi-hop question data sets."""

from collections.abc import Hashable, Sequence
from typing import ClassVar

from picbench.workloads.datasets.base import Dataset, Metric
from picbench.workloads.metrics.abstention import abstains
from picbench.workloads.prompts.segmentation import passages, title
from picbench.workloads.prompts.template import Template


class PassageQA(Dataset):
    """A question over numbered passages, answered in a few words."""

    metric: ClassVar[Metric] = "f1"
    max_tokens: ClassVar[int] = 32
    template: ClassVar[Template] = Template(
        "Several numbered passages come first, then a question about them. Reply with nothing "
        "but the fact asked for: a name, a place, a date, a number, yes or no.\n\n"
        "{context}\n\n"
        "That was the last passage. What do they say about this?\n\n"
        "Q: {input}\nShort reply:"
    )

    def marked(self, context: str) -> list[str]:
        """Cut before every passage."""
        return passages(context)

    def documents(self, chunks: Sequence[str]) -> Sequence[Hashable]:
        """Passages with one title are from one article; one without a title is alone."""
        return [title(chunk) or number for number, chunk in enumerate(chunks)]

    def abstained(self, prediction: str) -> bool:
        """Whether the reply says that the passages do not tell."""
        return abstains(prediction)
