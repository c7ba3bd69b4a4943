"""2WikiMultihopQA: bridge, comparison and inference questions over ten passages."""

from typing import ClassVar

from picbench.workloads.datasets.qa import PassageQA


class WikiMQA(PassageQA):
    """2WikiMultihopQA (Ho et al., 2020)."""

    name: ClassVar[str] = "2wikimqa"
    summary: ClassVar[str] = "bridge, comparison and inference questions, 10 passages"
