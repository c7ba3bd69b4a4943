"""An engine that answers nothing and notes what it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from picbench.engines.config import EngineConfig
from picbench.engines.request import Hits, Request, Result, Timings, TokenCounts


@dataclass
class Asked:
    """Notes what an engine is asked; each answer takes a second longer than the one before."""

    config: EngineConfig
    requests: list[Request] = field(default_factory=list)

    def generate(
        self, requests: Sequence[Request], *, max_tokens: int, ignore_eos: bool
    ) -> list[Result]:
        assert (len(requests), max_tokens, ignore_eos) == (1, 1, True)
        self.requests += requests
        timings = Timings(ttft=float(len(self.requests)), prefill=0.0, tpot=None, e2e=0.0)
        return [Result("", (5,), (), timings, TokenCounts(), Hits())]
