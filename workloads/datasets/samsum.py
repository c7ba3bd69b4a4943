"""SAMSum: summaries of chats, taught by examples."""

from typing import ClassVar

from picbench.workloads.datasets.base import Dataset, Metric
from picbench.workloads.prompts.segmentation import dialogues
from picbench.workloads.prompts.template import Template


class SAMSum(Dataset):
    """SAMSum (Gliwa et al., 2019) with example dialogues as the context."""

    name: ClassVar[str] = "samsum"
    summary: ClassVar[str] = "few-shot summaries of chats"
    metric: ClassVar[Metric] = "rouge-l"
    max_tokens: ClassVar[int] = 128
    chat: ClassVar[bool] = False
    template: ClassVar[Template] = Template(
        "Here are chats between friends, and under each of them what happened in it.\n\n"
        "{context}\n\n"
        "One more chat; say what happened in it, as briefly as above.\n\n"
        "{input}"
    )

    def marked(self, context: str) -> list[str]:
        """Cut before every example."""
        return dialogues(context)

    def extract(self, prediction: str) -> str:
        """Return the first line that is not empty: models continue with more examples."""
        return prediction.lstrip("\n").split("\n")[0]
