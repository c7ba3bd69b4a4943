"""Which chunks of a request are served as chunks and which as text: those that are sooner so.

A chunk that is missing is compiled if what this request and later ones save is expected to be more
than its compile takes. One that was seen before is expected to come as often again, and a new one
as most new chunks did lately, if it stays in the pool until then.

Other requests wait for what this one takes of the engine: that counts for each of them, beside the
time to its own first token.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.chunk_cache.sketch import FrequencySketch
from picbench.engines.costs import RequestSize
from picbench.engines.planning.keys import Key, pack_numbers
from picbench.engines.planning.plan import Canonical, Plan
from picbench.engines.planning.policy import Segment
from picbench.engines.request import Choice
from picbench.engines.vllm.scheduler.machine_costs import MachineCosts
from picbench.engines.vllm.scheduler.pool import Pool

#: The share of its compile that a chunk takes which a tier has. Tiers differ by far more; where it
#: is wrong, a chunk is computed as text that could have been loaded, or waits for a slow tier.
_LOAD = 0.2

#: What compiling chunks that were not seen before must save at least, as a share of the time as
#: text: costs may be wrong, and what is compiled takes room of others. Other shares were not tried.
_MARGIN = 0.1


#: A way that is expected to take at most so much longer is tried where its costs are unsure.
_TRY = 0.15


class Offer(NamedTuple):
    """A chunk of a prompt: its first token there, its tokens, and those that are linked.

    `missing` is the share of its compile that serving it as a chunk takes, from 0, resident, to 1.
    It is expected to be used so many times again; one that is not `known` was never seen.
    """

    start: int
    tokens: int
    linked: int
    missing: float = 0.0
    uses: float = 0.0
    known: bool = True


class PromptOffer(NamedTuple):
    """A prompt of so many tokens, and its chunks in their order.

    Of all of it as text vLLM's cache has the first `text_hit` tokens. With all chunks as chunks,
    `plan_hit` of the tokens that are computed then are found.
    """

    tokens: int
    chunks: Sequence[Offer]
    text_hit: int = 0
    plan_hit: int = 0


class Chooser:
    """Chooses for the requests of one scheduler, and remembers which chunks were seen."""

    def __init__(
        self, costs: MachineCosts, store: ChunkStore, pool: Pool, others: Callable[[], int]
    ) -> None:
        """`others` counts the requests that the engine has."""
        self.costs = costs
        self._store, self._pool, self._others = store, pool, others
        self.forget()

    def forget(self) -> None:
        """No chunk was seen."""
        self._store.forget_uses()
        self._sketch = FrequencySketch()

    def without_plan(
        self, segments: Sequence[Segment], names: Sequence[Key], text_hit: int
    ) -> Choice | None:
        """All text, where a plan could not show otherwise, which takes far longer than this; None
        for a prompt that needs one.

        Text it is if that is best even if all chunks that this tenant has sent before were resident
        and nothing of them were linked.
        """
        counts = {name: self._sketch.count(name) for name in names}
        offers, cached, at, own = list[Offer](), set[Key](), 0, iter(names)
        for segment in segments:
            tokens = len(segment.tokens)
            if segment.chunk:
                known = counts[name := next(own)] > 0
                uses = counts[name] or self._sketch.recurrence
                offers.append(Offer(at, tokens, 0, 0.0 if known else 1.0, uses, known))
                if known and at + tokens <= text_hit:
                    cached.add(name)
            at += tokens
        text = at - sum([offer.tokens for offer in offers])
        choice = self._best(PromptOffer(at, offers, text_hit, max(0, text - 1)))
        if len(choice.texts) < choice.chunks:
            return None
        for name in counts.keys() - cached:
            self._sketch.note(name)
        return choice

    def choose(
        self,
        segments: Sequence[Segment],
        names: Sequence[Key],
        keys: Sequence[Key],
        plan: Plan,
        text_hit: int,
    ) -> Choice:
        """How to serve a prompt whose chunks have these `names` and `keys`, and are all chunks in
        `plan`.

        Of its text vLLM's prefix cache has the first `text_hit` tokens. Chunks that are missing,
        and that the prefix cache does not have either, are seen by this, and those that are used
        for the first time since they were compiled.
        """
        named = dict(zip(keys, names, strict=True))
        canonicals = {canonical.key: canonical for canonical in plan.canonicals}
        views, own = iter(plan.placed), iter(keys)
        picked = plan.picks.count // len(keys) if plan.picks else 0
        new, seen = self._sketch.recurrence, dict[Key, int]()
        offers, at = list[Offer](), 0
        for segment in segments:
            tokens = len(segment.tokens)
            if segment.chunk:
                key, linked, missing = next(own), tokens, 0.0
                if (canonical := canonicals.get(key)) is not None:
                    linked = picked + tokens - next(views).view.real
                    missing = self._missing(canonical)
                if key not in seen and (missing or self._store.get(key).hits < 2):
                    cached = missing and at + tokens <= text_hit
                    seen[key] = (self._sketch.count if cached else self._sketch.note)(named[key])
                times = seen.get(key, 0)
                known = times > 0 or missing < 1
                offers.append(Offer(at, tokens, linked, missing, times or new, known))
            at += tokens
        fresh = self._pool.find_first(page.key or b"" for page in plan.computed)
        plan_hit = 0 if plan.copies else sum(page.real for page in plan.computed[: len(fresh)])
        return self._best(PromptOffer(at, offers, text_hit, plan_hit))

    def note(self, segments: Sequence[Segment], scope: str) -> None:
        """Chunks of a tenant are seen that are compiled, whatever would be sooner: whoever named
        them expects them again.
        """
        for name in names_of(segments, scope):
            self._sketch.note(name, times=2)

    def _best(self, prompt: PromptOffer) -> Choice:
        """The best way to serve a prompt now."""
        return choose(self.costs, prompt, self._store.kept_share, self._others())

    def _missing(self, canonical: Canonical) -> float:
        """The share of its compile that serving a chunk as one takes."""
        if self._store.is_mappable(canonical):
            return 0.0
        if self._store.is_remote(canonical.key):
            return _LOAD
        # What another request waits for is there before this one.
        return 0.0 if self._store.get(canonical.key).owner else 1.0


def names_of(segments: Sequence[Segment], scope: str) -> list[Key]:
    """What chunks of a tenant are counted by: hashes that take a fraction of their keys' time."""
    tenant = blake2b(scope.encode())
    names = list[Key]()
    for segment in segments:
        if segment.chunk:
            name = tenant.copy()
            name.update(pack_numbers(segment.tokens))
            names.append(name.digest())
    return names


def _seconds(costs: MachineCosts, others: int, size: RequestSize) -> float:
    """What a request and so many others wait for it in all."""
    return costs.first_token(size) + (others * costs.work(size) if others else 0.0)


def choose(costs: MachineCosts, prompt: PromptOffer, kept: float = 1.0, others: int = 0) -> Choice:
    """How a request is to be served, for its own sake and that of so many `others`.

    `kept` is the share of compiled chunks that come again while they are in the pool. Compared are
    all text, all chunks, and mixtures: the chunks that pay one by one, with or without those that
    are new or that the prefix cache has. The best has the least time, less what later requests
    save. Now and then a way is tried that is almost as good, and rarer.
    """
    chunks, every, linked = prompt.chunks, tuple(range(len(prompt.chunks))), costs.of(linked=True)
    seconds_of = partial(_seconds, costs, others)
    ends = (i for i in every if chunks[i].start + chunks[i].tokens > prompt.text_hit)
    cached = next(ends, len(chunks))
    token = linked.of_token(prompt.tokens)
    saved = [token * (offer.tokens - offer.linked) - linked.chunks for offer in chunks]

    # Chunks that are missing and that the prefix cache has, and those that were never seen.
    double, unsure, paying = set[int](), set[int](), list[int]()
    for i, (_, tokens, _, share, uses, known) in enumerate(chunks):
        if share == 1 and i < cached:
            double.add(i)
        if not known:
            unsure.add(i)
        gain = saved[i] * (1 + uses * kept) * (1 if known else 1 - _MARGIN)
        if saved[i] > 0 and gain > share * linked.of_compile(tokens) and i not in double:
            paying.append(i)
    sure = tuple(i for i in paying if i not in unsure)
    wanted = [tuple(paying), sure, tuple(i for i in sure if i >= cached), every]
    text = least = seconds_of(_size(prompt, ()))
    best: tuple[int, ...] = ()
    mapped = inf, best
    for own in dict.fromkeys(filter(None, wanted)):
        worth = seconds_of(_size(prompt, own))
        if double.isdisjoint(own):
            worth -= _later(seconds_of, prompt, own, saved, kept)
        margin = 0.0 if (double | unsure).isdisjoint(own) else _MARGIN
        if worth < least - margin * text:
            best, least = own, worth
        if not any(chunks[i].missing for i in own):
            mapped = min(mapped, (worth, own))
    if not others and costs.is_unsure(linked=not best):
        # What a way takes shows only in requests that are served so.
        tried, own = (text, ()) if best else mapped
        best = own if tried < (1 + _TRY) * least else best
    expected = costs.first_token(_size(prompt, best))
    return Choice(len(chunks), tuple(sorted({*every}.difference(best))), expected)


def _later(
    seconds_of: Callable[[RequestSize], float],
    prompt: PromptOffer,
    own: Sequence[int],
    saved: Sequence[float],
    kept: float,
) -> float:
    """Seconds that later requests save because chunks are compiled now.

    They are taken to be like this one, but to begin with another chunk, and save what it would if
    its chunks were resident; that is shared out among the chunks.
    """
    chunks, shares = prompt.chunks, [max(0.0, saved[i]) for i in own]
    pairs = [(chunks[i], share) for i, share in zip(own, shares, strict=True) if chunks[i].missing]
    uses = sum(share * offer.uses * kept for offer, share in pairs)
    if not uses:
        return 0.0
    other = prompt._replace(text_hit=min(prompt.text_hit, chunks[0].start), plan_hit=0)
    gain = seconds_of(_size(other, ())) - seconds_of(_size(other, own, warm=True))
    return max(0.0, gain) * uses / sum(shares)


def _size(prompt: PromptOffer, own: Collection[int], *, warm: bool = False) -> RequestSize:
    """The request if the chunks `own` are served as chunks; `warm`: if they were resident."""
    every = len(own) == len(prompt.chunks)
    chunks = prompt.chunks if every else [prompt.chunks[i] for i in own]
    hit = min(prompt.text_hit, chunks[0].start) if chunks else prompt.text_hit
    if every and chunks and not warm:
        hit = prompt.plan_hit
    computed = prompt.tokens - hit - sum([c.tokens - c.linked for c in chunks])
    missing = [] if warm else [c for c in chunks if c.missing]
    work = sum([c.missing * c.tokens for c in missing])
    mean = work / len(missing) if missing else 0.0
    return RequestSize(prompt.tokens, max(1.0, computed) + work, work, len(chunks), mean, 1.0)
