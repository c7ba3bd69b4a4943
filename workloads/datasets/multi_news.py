"""Multi-News: one summary of several articles."""

from typing import ClassVar

from picbench.workloads.datasets.base import Dataset, Metric
from picbench.workloads.prompts.segmentation import articles
from picbench.workloads.prompts.template import Template


class MultiNews(Dataset):
    """Multi-News (Fabbri et al., 2019)."""

    name: ClassVar[str] = "multi_news"
    summary: ClassVar[str] = "a summary of several news articles"
    metric: ClassVar[Metric] = "rouge-l"
    max_tokens: ClassVar[int] = 512
    template: ClassVar[Template] = Template(
        "Different papers reported the same event. Their articles:\n\n"
        "{context}\n\n"
        "{input}Tell a reader who has seen none of them what happened, in a few paragraphs.\n\n"
        "Report:"
    )

    def marked(self, context: str) -> list[str]:
        """Cut before every article."""
        return articles(context)
