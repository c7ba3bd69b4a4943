"""MuSiQue: questions that need two to four facts from up to twenty passages."""

from typing import ClassVar

from picbench.workloads.datasets.qa import PassageQA


class MuSiQue(PassageQA):
    """MuSiQue-Ans (Trivedi et al., 2022)."""

    name: ClassVar[str] = "musique"
    summary: ClassVar[str] = "questions over 2-4 hops, up to 20 passages"
