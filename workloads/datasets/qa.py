"""Questions over passages: the multi-hop data sets, and any other that a user names."""

from typing import ClassVar

from picbench.workloads.datasets.base import Dataset, Metric
from picbench.workloads.metrics.abstention import abstains
from picbench.workloads.prompts.segmentation import passages
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

    def abstained(self, prediction: str) -> bool:
        """Whether the reply says that the passages do not tell."""
        return abstains(prediction)


class MuSiQue(PassageQA):
    """MuSiQue-Ans (Trivedi et al., 2022): two to four facts from up to twenty passages."""

    name: ClassVar[str] = "musique"
    summary: ClassVar[str] = "questions over 2-4 hops, up to 20 passages"


class WikiMQA(PassageQA):
    """2WikiMultihopQA (Ho et al., 2020)."""

    name: ClassVar[str] = "2wikimqa"
    summary: ClassVar[str] = "bridge, comparison and inference questions, 10 passages"


class HotpotQA(PassageQA):
    """HotpotQA in the distractor setting (Yang et al., 2018)."""

    name: ClassVar[str] = "hotpotqa"
    summary: ClassVar[str] = "two-hop questions, 2 gold passages among distractors"


class AnyQA(PassageQA):
    """Short answers to questions over text, such as SQuAD's; there are no bundled rows of it."""

    name: ClassVar[str] = "qa"
    summary: ClassVar[str] = "questions over passages or a text, in rows that you name with --data"
