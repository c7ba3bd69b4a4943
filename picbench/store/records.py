"""What a run and the process of an arm's engine send each other, and the rows made of it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, fsum, log
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from picbench.engines.chunk_cache.transfers import StepTimes
from picbench.engines.ledger import Snapshot
from picbench.engines.request import FAILED, Choice, Hits, Result, TokenCounts
from picbench.errors import ConfigError, DataError
from picbench.workloads.facts import ChunkSet
from picbench.workloads.sample import Sample


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that gave no result, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class ServedReply:
    """The reply of a remote server; times in seconds, as in `Timings`.

    Only the number of its tokens is known. `cached_tokens` of the prompt came from the server's
    cache, None if it does not say.
    """

    text: str
    output_tokens: int
    ttft: float
    tpot: float | None
    e2e: float
    late: float = 0.0
    cached_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What a remote server counted by itself, over all of its engines and users.

    Tokens of prompts: all, those that came from any cache, those looked up in its prefix cache,
    those found there, and those found in a cache outside of the engine. `peak_kv_usage` is the
    largest share of its KV memory, from 0 to 1, that was seen in use. None is what it does not say.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    external_hit_tokens: int | None = None
    preemptions: int | None = None
    peak_kv_usage: float | None = None

    @property
    def reused_share(self) -> float | None:
        """The share of prompt tokens that came from its caches, None where it does not say."""
        if self.prompt_tokens and self.cached_tokens is not None:
            return self.cached_tokens / self.prompt_tokens
        if self.queried_tokens and self.hit_tokens is not None:
            return (self.hit_tokens + (self.external_hit_tokens or 0)) / self.queried_tokens
        return None

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        """Both together; what one of them does not say is not known of both."""
        usages = [u for u in (self.peak_kv_usage, other.peak_kv_usage) if u is not None]
        sums = sum_fields((self, other)) | {"peak_kv_usage": max(usages, default=None)}
        return ServerCounts(**sums)


def sum_fields(counts: Sequence[ServerCounts | TokenCounts | Hits]) -> dict[str, Any]:
    """Sums of the fields of counts of one kind; None of a field that is not known of all."""
    columns = {f.name: [getattr(count, f.name) for count in counts] for f in fields(counts[0])}
    return {name: None if None in column else _sum(column) for name, column in columns.items()}


def _sum(column: Sequence[Any]) -> Any:
    """Of numbers, or of numbers by name."""
    if isinstance(column[0], Mapping):
        return dict(sum(map(Counter[str], column), Counter()))
    return sum(column)


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How near an arm is to ``full`` along its reply, in the mean over tokens.

    `kl` is the Kullback-Leibler divergence of its distribution of the next token from that of
    `full`, in nats, and `same_top` the share of tokens at which both find the same one likeliest.
    """

    kl: float
    same_top: float


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The results of a group of requests, in their order.

    `busy` is the engine's wall-clock seconds; `snapshots` is its block ledger, whose times start at
    the group's start. `moved` gives the bytes (loaded, stored) between the pool and each tier,
    `compiled` the kernels that were compiled meanwhile, `evicted` the blocks of `chunk` and
    `prefix` KV that lost it. If it is not `clean`, a request failed and each was run again on its
    own, so that timings mean nothing. `counted` is what a remote server counted meanwhile. `nlls`
    are what requests cost whose reply was the right answer, in nats a token (see `answer_nats`),
    `firsts` what would have been the first tokens of replies; empty where that was not asked, as is
    `fidelity`.
    """

    outcomes: tuple[Result | ServedReply | Failure, ...]
    busy: float
    snapshots: tuple[Snapshot, ...] = ()
    clean: bool = True
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)
    compiled: tuple[str, ...] = ()
    evicted: Mapping[str, int] = field(default_factory=dict)
    counted: ServerCounts | None = None
    nlls: tuple[float | None, ...] = ()
    firsts: tuple[int | None, ...] = ()
    fidelity: tuple[Fidelity | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ArmBatch:
    """One arm's answer to one group of samples, which are as they were sent to it.

    `arrivals` are in seconds, None in a closed loop. `lost` says why the arm's engine is gone, None
    if it served the group.
    """

    round: int
    arm: str
    samples: Sequence[Sample]
    result: GroupResult
    arrivals: Sequence[float] | None = None
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run: `context` in tokens, the rest in blocks of 16 tokens.

    `longest` is what the longest request needs at least, `chunks` all distinct chunks, `pool`
    what every arm's engine gets.
    """

    context: int
    longest: int
    chunks: int
    pool: int


#: The finish reasons of a request that `on_pressure=reject` turned away, and of one that an engine
#: gave up when it was paused or shut down (vllm/v1/engine/core.py, `FinishReason.ABORT`).
REJECTED, ABORTED = "rejected", "abort"

#: What became of a request: it was answered; the reply says that the prompt does not tell; there is
#: nothing in the reply to score; there is no reply.
Outcome = Literal["answered", "abstained", "unparsed", "error"]


@dataclass(frozen=True, slots=True)
class Grader:
    """Scores replies and tells what they are.

    `score` takes a reply and its right answers, and gives None for what cannot be scored;
    `abstained` takes a reply.
    """

    score: Callable[[str, Sequence[str]], float | None]
    abstained: Callable[[str], bool] = lambda reply: False

    def __call__(self, reply: str, answers: Sequence[str]) -> tuple[float | None, Outcome]:
        """The score of a reply and its outcome.

        A blank reply has no score, as has one in which `score` finds nothing, and one to which no
        right answer is known. A right answer is never an abstention. Raises DataError if `score`
        gives what is no score.
        """
        if not answers:
            return None, "answered"
        score = self.score(reply, answers) if reply.strip() else None
        if score is None:
            return None, "unparsed"
        # A NaN is refused as well: in a mean it would hide all other scores.
        if not 0 <= score <= 1:
            raise DataError(
                f"the score of a reply is {score}, and not from 0 to 1",
                hint="see `score` of the data set's class",
            )
        return score, "abstained" if score < 1 and self.abstained(reply) else "answered"


#: What files may have.
Time = Annotated[float, Field(ge=0)]
Score = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One request of one arm; times in milliseconds, hashes of token ids.

    A remote server tells neither `prefill_ms` nor the ids of a reply: `output_sha256` is then that
    of its text, in UTF-8, and `tokens.reused` is None if the server does not say. Either `error` is
    set or every field after it is, except `tpot_ms`, which needs two tokens, and `score`, which
    needs an answer to score. `documents` is a hash of the set of the prompt's chunks, `cluster`
    names the samples that share some (see `ChunkSet`). Rows that are not `timed` ran apart from
    their group, after another request had failed. `expected_reuse` are the prompt tokens that the
    arm's cache has in the state that the run declares (see `DeclaredCache`), None without one; what
    was found is in `tokens`. `repeat` counts how often the whole schedule was run before; rounds
    are numbered through. `arrival_ms` counts from the start of the arm's batch; it is None in a
    closed loop. A request was submitted `late_ms` after it arrived, which is part of its latencies.
    `nll` is the negative log-probability of the right answer in nats a token, if it was measured,
    and `first` the id of the likeliest first token; `kl` and `same_top` are the row's `Fidelity`.
    `choice` is which chunks `auto` served as text, None under other algorithms.
    """

    arm: str
    sample: str
    round: int
    timed: bool
    prompt_sha256: str
    outcome: Outcome = "answered"
    documents: str | None = None
    cluster: str | None = None
    arrival_ms: float | None = None
    error: str | None = None
    late_ms: Time | None = None
    ttft_ms: Time | None = None
    prefill_ms: Time | None = None
    tpot_ms: Time | None = None
    e2e_ms: Time | None = None
    output_tokens: int = 0
    output_sha256: str | None = None
    tokens: TokenCounts = field(default_factory=TokenCounts)
    hits: Hits = field(default_factory=Hits)
    finish_reason: str | None = None
    text: str | None = None
    score: Score | None = None
    expected_reuse: int | None = None
    repeat: int = 0
    nll: Nats | None = None
    first: int | None = None
    kl: Nats | None = None
    same_top: Score | None = None
    choice: Choice | None = None

    @property
    def ttft_over_expected(self) -> float | None:
        """The time to the first token over what was expected for a request alone (`auto`)."""
        expected = self.choice and self.choice.expected
        return self.ttft_ms / expected / 1e3 if expected and self.ttft_ms is not None else None

    @property
    def perplexity(self) -> float | None:
        """Of the right answer."""
        return None if self.nll is None else exp(self.nll)

    @property
    def exp_kl(self) -> float | None:
        """The divergence as a factor, which has a logarithm where it is 0."""
        return None if self.kl is None else exp(self.kl)


def to_rows(batch: ArmBatch, grader: Grader, sets: Mapping[str, ChunkSet]) -> list[SampleRow]:
    """The rows of a batch, in the order of its samples; `sets` has every sample's chunks."""
    nothing = [None] * len(batch.samples)
    arrivals: Sequence[float | None] = batch.arrivals or nothing
    result = batch.result
    judged = (column or nothing for column in (result.nlls, result.firsts, result.fidelity))
    columns = batch.samples, result.outcomes, arrivals, *judged
    rows = []
    for sample, reply, arrival, nll, first, fidelity in zip(*columns, strict=True):
        row = SampleRow(
            arm=batch.arm,
            sample=sample.id,
            round=batch.round,
            timed=False,
            prompt_sha256=hash_tokens(sample.tokens),
            documents=sets[sample.id].documents,
            cluster=sets[sample.id].cluster,
            arrival_ms=None if arrival is None else 1e3 * arrival,
        )
        error = failure_of(reply)
        if error is not None or isinstance(reply, Failure):
            rows.append(replace(row, outcome="error", error=error))
            continue
        score, outcome = grader(reply.text, sample.answers)
        row = replace(row, timed=result.clean, outcome=outcome, score=score, nll=nll, first=first)
        if fidelity is not None:
            row = replace(row, kl=fidelity.kl, same_top=fidelity.same_top)
        rows.append(replace(row, **_measured(reply, sample, queued=arrival is not None)))
    return rows


def answer_nats(reply: Result) -> float:
    """What the model thought of a reply that was forced, in nats a token.

    Its log-probabilities say how likely each token was after those before it.
    """
    steps = zip(reply.tokens, reply.logprobs or (), strict=True)
    return max(0.0, -fsum(step[token] for token, step in steps) / len(reply.tokens))


def likeliest(reply: Result) -> int:
    """The token that the model would have begun a reply with that was forced."""
    first = (reply.logprobs or ())[0]
    return max(first, key=first.__getitem__)


def compare_steps(full: Result, other: Result) -> Fidelity:
    """How near another arm is to `full` along the same reply, by the likeliest tokens of both.

    The divergence is over those of `full` and all others as one, and the other arm may find one
    that it does not list as likely as the last of its own: it is at most that over all tokens.
    """
    steps = list(zip(full.logprobs or (), other.logprobs or (), strict=True))
    kls = []
    for known, found in steps:
        # The token of the reply is listed even if it is unlikely, and is no bound to others.
        last = sorted(found.values(), reverse=True)[: len(known)][-1]
        rest = max(1.0 - fsum(map(exp, known.values())), 0.0)
        others = max(1.0 - fsum(exp(found[t]) for t in known if t in found), _LEAST)
        of_rest = rest * log(rest / others) if rest else 0.0
        told = (exp(own) * (own - found.get(token, last)) for token, own in known.items())
        kls.append(max(0.0, fsum(told) + of_rest))
    same = sum(
        max(known, key=known.__getitem__) == max(found, key=found.__getitem__)
        for known, found in steps
    )
    return Fidelity(fsum(kls) / len(kls), same / len(steps))


#: The least probability that is told apart from 0.
_LEAST = 1e-9


def failure_of(reply: Result | ServedReply | Failure) -> str | None:
    """Why a request has no reply that could be timed or scored; None where it has one.

    An engine that stops or that fails ends replies early, and says so in their finish reason.
    """
    if isinstance(reply, Failure):
        return reply.message
    if reply.finish_reason == REJECTED:
        return "rejected: short of KV blocks"
    if reply.finish_reason in (FAILED, ABORTED):
        return getattr(reply, "error", None) or f"the reply ended with {reply.finish_reason}"
    tokens = reply.output_tokens if isinstance(reply, ServedReply) else len(reply.tokens)
    return None if tokens else "the reply has no token"


def hash_tokens(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit integers, in hex."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def _measured(reply: Result | ServedReply, sample: Sample, *, queued: bool) -> dict[str, Any]:
    """Fields of the row of an answered request; `queued` are requests of an open loop."""
    times = reply if isinstance(reply, ServedReply) else reply.timings
    found: dict[str, Any] = {
        "late_ms": 1e3 * times.late if queued else None,
        "ttft_ms": 1e3 * times.ttft,
        "tpot_ms": None if times.tpot is None else 1e3 * times.tpot,
        "e2e_ms": 1e3 * times.e2e,
        "finish_reason": reply.finish_reason,
        "text": reply.text,
    }
    if isinstance(reply, ServedReply):
        text = reply.text.encode("utf-8", "surrogatepass")
        return found | {
            "output_tokens": reply.output_tokens,
            "output_sha256": hashlib.sha256(text).hexdigest(),
            # The server has counted as many prompt tokens as the sample has.
            "tokens": TokenCounts(sample.prompt_tokens, reply.cached_tokens, prefix=None),
        }
    return found | {
        "prompt_sha256": hash_tokens(reply.prompt_tokens),
        "prefill_ms": 1e3 * reply.timings.prefill,
        "output_tokens": len(reply.tokens),
        "output_sha256": hash_tokens(reply.tokens),
        "tokens": reply.counts,
        "hits": reply.hits,
        "choice": reply.choice,
    }


def parse_slo(text: str) -> dict[str, float]:
    """Read ``ttft=500,tpot=50``: the longest times that still count as good, by field of a row.

    Raises ConfigError for anything else.
    """
    bounds: dict[str, float] = {}
    for setting in text.split(","):
        name, _, number = setting.strip().partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        field = f"{name}_ms"
        if name not in ("ttft", "tpot", "e2e") or field in bounds or not 0 < value < float("inf"):
            raise ConfigError(
                f"`slo` {text!r}: {setting!r} is no objective",
                hint="write ttft=MS, tpot=MS and e2e=MS, with commas between them",
            )
        bounds[field] = value
    return bounds


@dataclass(slots=True)
class Tally:
    """What one arm did, round after round: rows, and results without their outcomes."""

    rows: list[SampleRow] = field(default_factory=list)
    results: list[GroupResult] = field(default_factory=list)

    def add(self, rows: Iterable[SampleRow], result: GroupResult) -> None:
        """Add a round."""
        self.rows.extend(rows)
        self.results.append(replace(result, outcomes=()))

    @property
    def failed(self) -> int:
        """Requests without a result."""
        return sum(row.error is not None for row in self.rows)

    @property
    def busy(self) -> float:
        """Busy seconds of clean rounds, which are those with timings."""
        return sum((result.busy for result in self.results if result.clean), 0.0)

    @property
    def evicted(self) -> Counter[str]:
        """How many blocks of `chunk` and `prefix` KV lost it."""
        found = Counter[str]()
        for result in self.results:
            found.update(result.evicted)
        return found

    @property
    def snapshots(self) -> list[Snapshot]:
        """The block ledger of all rounds.

        Its clock stops while other arms compute, so that averages over time are averages over the
        arm's own busy time.
        """
        found: list[Snapshot] = []
        clock = 0.0
        for result in self.results:
            found += (
                replace(snapshot, step=step, time=clock + snapshot.time)
                for step, snapshot in enumerate(result.snapshots, len(found))
            )
            clock += result.busy
        return found
