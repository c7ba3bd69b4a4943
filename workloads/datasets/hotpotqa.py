"""HotpotQA: two passages hold the answer, the others distract."""

from typing import ClassVar

from picbench.workloads.datasets.qa import PassageQA


class HotpotQA(PassageQA):
    """HotpotQA in the distractor setting (Yang et al., 2018)."""

    name: ClassVar[str] = "hotpotqa"
    summary: ClassVar[str] = "two-hop questions, 2 gold passages among distractors"
