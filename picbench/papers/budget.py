"""How long a reproduction may take, and what its parts are expected to."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

from picbench.engines.config import BLOCK_SIZE
from picbench.papers.settings import AttentionSettings, LatencyPoint, LatencySettings, Point
from picbench.workloads.traffic.traffic_facts import TrafficFacts


@dataclass(frozen=True, slots=True)
class ReuseCost:
    """What an arm does for a chunk that it has: links some of it, and may copy all of it."""

    chunk_s: float
    token_s: float
    copies: bool = False


#: Prompt tokens a second that are computed, and what else is one of reused chunks, by arm. CPU: two
#: cores of an AMD EPYC, testbed model, README's demo. CUDA: H200, Llama-3.1-8B's shape, prompts of
#: 1.9k tokens in 10 chunks, results/papers/minipic, and Mistral-7B's, 1.1k to 8.2k tokens in 2 to
#: 16 chunks, results/papers/mepic, and loads of results/papers/epic: what all of them took is 0.57
#: to 1.43 of what is expected.
COMPUTED: Mapping[str, float] = {"cpu": 3_400, "cuda": 41_000}
REUSED: Mapping[str, Mapping[str, ReuseCost]] = {
    "cpu": {"other": ReuseCost(0.0, 1 / 16_000)},
    "cuda": {
        "epic": ReuseCost(1.0e-3, 1 / 400_000, copies=True),
        "mepic": ReuseCost(0.9e-3, 0.0),
        "minipic": ReuseCost(0.15e-3, 0.0),
        "naive": ReuseCost(0.3e-3, 0.0),
        "other": ReuseCost(0.5e-3, 1 / 90_000, copies=True),
    },
}

#: Share of a full pool that is not of running requests, in the mean of a run: 0.08 to 0.27 in
#: results/papers/mepic.
_IDLE = 0.15

#: Seconds that requests which run together take at least, for replies of 16 tokens: 64 at a time,
#: which no load on a GPU is below, took 0.9 (results/papers/minipic).
_ROUND: Mapping[str, float] = {"cpu": 0.0, "cuda": 0.9}

#: How often what is forgotten and what waits are made to agree.
_ROUNDS = 8

#: Arms that compute what the same text does not precede.
_PREFIX_ONLY = ("full", "prefix")

#: Tokens a second of one request at a time, of which nothing is cached.
ALONE: Mapping[str, float] = {"cpu": 2_700, "cuda": 38_000}

#: Seconds until engines answer that start together: start, compilation, graphs, first requests.
START: Mapping[str, float] = {"cpu": 25, "cuda": 100}

#: Tokens of the question of a single request.
QUESTION = 32


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens that a pool holds, and how many requests run at a time."""

    tokens: int
    running: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Room":
        """What a run's settings give its requests."""
        return cls(settings["kv_blocks"] * BLOCK_SIZE, settings["max_running"])


def expected_load(point: Point, facts: TrafficFacts) -> float:
    """Seconds of a point of a load: of each arm until it has served all, and all have arrived."""
    room = Room.of(point.run)
    return sum(expected_arm(arm, facts, point.device, room) for arm in point.arms)


def expected_arm(arm: str, facts: TrafficFacts, device: str, room: Room) -> float:
    """Seconds of one arm."""
    rounds = facts.requests / room.running * _ROUND[device]
    return max(_work(arm, facts, device, room), rounds, _arriving(facts))


def _work(arm: str, facts: TrafficFacts, device: str, room: Room) -> float:
    """Seconds of computing prompts, of what is linked in them and of copies."""
    kind, costs = arm.partition(":")[0], REUSED[device]
    if kind in _PREFIX_ONLY:
        return facts.requests * facts.mean_tokens / COMPUTED[device]
    cost = costs.get(kind, costs["other"])
    recurring = facts.mean_tokens - facts.fresh_tokens

    def seconds(kept: float) -> float:
        found = recurring * kept
        chunks = found / facts.mean_chunk_tokens if facts.mean_chunk_tokens else 0.0
        computed = (facts.mean_tokens - found) / COMPUTED[device]
        return facts.requests * (computed + chunks * cost.chunk_s + found * cost.token_s)

    kept = 1.0
    if cost.copies:
        # What is forgotten takes time, in which more requests wait and hold more of the pool.
        for _ in range(_ROUNDS):
            kept = _kept(facts, room, _backlog(facts, seconds(kept)))
    return seconds(kept)


def _arriving(facts: TrafficFacts) -> float:
    return facts.requests / facts.rate if facts.rate else 0.0


def _backlog(facts: TrafficFacts, seconds: float) -> float:
    """Requests that have arrived and are not served yet, when the last one arrives."""
    return facts.requests * max(0.0, 1.0 - _arriving(facts) / seconds) if seconds else 0.0


def _kept(facts: TrafficFacts, room: Room, backlog: float) -> float:
    """Share of recurring chunks that a pool still holds, of arms that copy chunks.

    Between two uses of a chunk, requests write their copies of others; a chunk is found again where
    these fit beside what running requests hold. Uses are as far apart as random draws are.
    """
    if not facts.mean_chunks:
        return 1.0
    held = min(room.running, backlog) * facts.mean_tokens
    idle = max(_IDLE * room.tokens, room.tokens - held)
    between = facts.unique_chunks / facts.mean_chunks * facts.mean_tokens
    return 1.0 - exp(-idle / between)


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
