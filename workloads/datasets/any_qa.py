"""Questions over passages or texts of any data set that is named with `data`."""

from typing import ClassVar

from picbench.workloads.datasets.qa import PassageQA


class AnyQA(PassageQA):
    """Short answers to questions over text, such as SQuAD's; there are no bundled rows of it."""

    name: ClassVar[str] = "qa"
    summary: ClassVar[str] = "questions over passages or a text, in rows that you name with --data"
