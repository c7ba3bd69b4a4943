"""The cost of a request's prompt: which of its tokens were cached, and where the others come from.

What was compiled for a request is no hit, although the request then reads it as if it were one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from picbench.engines.planning.keys import Key
from picbench.engines.planning.pages import Page, SlotKind
from picbench.engines.planning.plan import Plan
from picbench.engines.request import Choice, Hits, TokenCounts


@dataclass(slots=True)
class Brought:
    """What was brought into the pool, or into a request's own blocks, for this request.

    `compiled` are names of pages, for which `work` tokens were computed. `loaded` has the tiers of
    pages; where the request's own compile had stored them, they count as compiled. `blocks` counts
    loaded blocks by tier.
    """

    compiled: set[Key | None] = field(default_factory=set)
    work: int = 0
    loaded: dict[Key, str] = field(default_factory=dict)
    blocks: Counter[str] = field(default_factory=Counter)

    def load(self, names: Sequence[Key], tier: str) -> None:
        """A tier has loaded pages; one that fills several blocks is named as often."""
        self.loaded.update(dict.fromkeys(names, tier))
        self.blocks[tier] += len(names)

    def compile(self, pages: tuple[Page, ...]) -> None:
        """Pages of a chunk, and of what it is compiled after, are computed."""
        self.compiled.update(page.key for page in pages)
        self.work += sum(page.real for page in pages)

    def __bool__(self) -> bool:
        return bool(self.compiled or self.loaded)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """The cost of a request's prompt, known once the request was first scheduled."""

    tokens: TokenCounts
    hits: Hits
    choice: Choice | None = None

    @classmethod
    def of_text(cls, prompt: int, hit_tokens: int, block_size: int, choice: Choice | None) -> Self:
        """The cost of a prompt whose chunks are text, of which prefix caching found so much."""
        tokens = TokenCounts.plain(prompt, hit_tokens)
        return cls(tokens, Hits(prefix=hit_tokens // block_size), choice)

    @classmethod
    def of(cls, plan: Plan, hits: int, brought: Brought, choice: Choice | None = None) -> Self:
        """The cost of a prompt whose first `hits` pages are not computed when it runs."""
        fresh = plan.pages_from(hits)
        prefix = sum(page.real for page in plan.computed[: hits - plan.canonical])
        pooled, compiled, loaded = _origins(plan, brought)
        tokens = TokenCounts(
            prompt=plan.prompt_tokens,
            reused=pooled + loaded.total() + prefix,
            compiled=compiled,
            linked=sum(page.kinds.count(SlotKind.LINKED) for page in fresh),
            padded=plan.count(SlotKind.PAD),
            prefix=prefix,
            compile_work=brought.work,
            loaded=dict(+loaded),
        )
        found = hits - plan.canonical
        blocks = Hits(plan.shared, found, len(plan.copies), dict(brought.blocks))
        return cls(tokens, blocks, choice)


def _origins(plan: Plan, brought: Brought) -> tuple[int, int, Counter[str]]:
    """Visible tokens in canonical pages: found in the pool, compiled, and loaded by tier.

    The first tokens stand for those that a worker picks, as in `Plan.kind_runs`.
    """
    hidden, pooled, compiled, loaded = plan.picks.count if plan.picks else 0, 0, 0, Counter[str]()
    for name, real in _canonical(plan, brought):
        picked = min(hidden, real)
        hidden -= picked
        if name in brought.compiled:
            compiled += real - picked
        elif name in brought.loaded:
            loaded[brought.loaded[name]] += real - picked
        else:
            pooled += real - picked
    return pooled, compiled, loaded


def _canonical(plan: Plan, brought: Brought) -> Iterator[tuple[Key, int]]:
    """Names and visible tokens of canonical pages; of chunks where all were in the pool."""
    for view, _ in plan.placed:
        if not brought:  # A prompt of 32k tokens has two thousand pages.
            yield b"", view.real
            continue
        for page in view.pages:
            yield page.copy_of or page.name, page.real
