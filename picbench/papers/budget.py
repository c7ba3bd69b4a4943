"""How long a reproduction may take, and what its parts are expected to."""

from collections.abc import Callable, Mapping
from time import monotonic

from picbench.papers.paper_settings import AttentionSettings, LatencyPoint, LatencySettings, Point
from picbench.workloads.traffic.traffic_facts import TrafficFacts

#: Prompt tokens a second that are computed, and what else is one of reused chunks, by arm. CPU: two
#: cores of an AMD EPYC, testbed model, README's demo. CUDA: H200, Llama-3.1-8B's shape, prompts of
#: 1.9k and 4.1k tokens: results/papers/minipic, and three runs of EPIC's Figure 8; mepic links as
#: many tokens as epic, and copies none.
COMPUTED: Mapping[str, float] = {"cpu": 3_400, "cuda": 41_000}
REUSED: Mapping[str, Mapping[str, float]] = {
    "cpu": {"other": 16_000},
    "cuda": {
        "epic": 120_000,
        "mepic": 250_000,
        "minipic": 1_200_000,
        "naive": 1_200_000,
        "other": 70_000,
    },
}

#: Arms that compute what the same text does not precede.
_PREFIX_ONLY = ("full", "prefix")

#: Tokens a second of one request at a time, of which nothing is cached.
ALONE: Mapping[str, float] = {"cpu": 2_700, "cuda": 38_000}

#: Seconds until engines answer that start together: start, compilation, graphs, first requests.
START: Mapping[str, float] = {"cpu": 25, "cuda": 100}

#: Tokens of the question of a single request.
QUESTION = 32

#: How far expectations may be off before they are no longer corrected by what was measured.
_LEAST, _MOST = 0.2, 5.0


class TimeBudget:
    """Seconds that may be spent (0: no limit), against what work is expected to take.

    Expectations are corrected by how long earlier work took. `clock` gives seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self._expected = self._took = 0.0
        self.stopped = False

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def factor(self) -> float:
        """By how much work took longer than expected."""
        if not self._expected:
            return 1.0
        return min(_MOST, max(_LEAST, self._took / self._expected))

    def allows(self, expected: float, start: float = 0.0) -> bool:
        """Whether there is time for work of so many seconds, after engines have started."""
        if not self._seconds:
            return True
        enough = self.spent + start + expected * self.factor <= self._seconds
        self.stopped = self.stopped or not enough
        return enough and not self.stopped

    def note(self, expected: float, took: float) -> None:
        """Correct expectations."""
        self._expected += expected
        self._took += took


def expected_load(point: Point, facts: TrafficFacts) -> float:
    """Seconds of a point of a load: of each arm until it has served all, and all have arrived."""
    return sum(expected_arm(arm, facts, point.device) for arm in point.arms)


def expected_arm(arm: str, facts: TrafficFacts, device: str) -> float:
    """Seconds of one arm."""
    arriving = facts.requests / facts.rate if facts.rate else 0.0
    kind, speeds = arm.partition(":")[0], REUSED[device]
    computed = facts.mean_tokens if kind in _PREFIX_ONLY else facts.fresh_tokens
    reused = (facts.mean_tokens - computed) / speeds.get(kind, speeds["other"])
    return max(facts.requests * (computed / COMPUTED[device] + reused), arriving)


def expected_latency(settings: LatencySettings, point: LatencyPoint, device: str) -> float:
    """Seconds of a prompt under all arms, in all repeats and the one before them.

    A warm arm compiles its chunks first, which takes about as long as full recompute.
    """
    tokens = point.chunks * point.tokens + QUESTION
    return tokens * latency_serves(settings) * 1.2 / ALONE[device]


def expected_attention(settings: AttentionSettings) -> float:
    """Seconds of attention on the CPU, of two cores of an AMD EPYC."""
    return 5.0 * settings.rows * len(settings.arms)


def latency_serves(settings: LatencySettings) -> int:
    """How often a prompt of a latency experiment is served."""
    return (settings.repeats + 1) * len(settings.arms)
