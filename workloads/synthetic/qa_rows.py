"""Questions over passages, in the manner of MuSiQue, 2WikiMultihopQA and HotpotQA."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random

from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.names import Split
from picbench.workloads.synthetic.passage_plan import (
    PassagePlan,
    plant_bridge_comparison,
    plant_chain,
    plant_comparison,
    plant_kinship,
    plant_same,
)
from picbench.workloads.synthetic.passages import Passage, accounts, numbered
from picbench.workloads.synthetic.questions import (
    Question,
    bridge_comparison,
    chain,
    comparison,
    kinship,
    same,
)
from picbench.workloads.synthetic.world import StatedFacts

# Multiples of the golden ratio spread evenly over the unit interval.
_GOLDEN = 0.618033988749895


@dataclass(frozen=True, slots=True)
class Sort:
    """A sort of question: its share of the rows, how to plant one, how to find one in a context."""

    share: float
    plant: Callable[[Random, PassagePlan], Question]
    more: Callable[[Random, StatedFacts], Question | None]


@dataclass(frozen=True, slots=True)
class PassageQuestions:
    """Makes contexts of `least` to `most` passages and asks questions of these sorts."""

    sorts: tuple[Sort, ...]
    least: int
    most: int

    def __call__(self, rng: Random, split: Split, index: int, level: Level) -> Example:
        """Make an example; see `example.Make`."""
        plan = PassagePlan(rng, split, level.manner)
        sort = rng.choice(self.sorts) if level.even else self._due(index)
        question = sort.plant(rng, plan)
        passages = plan.write(level.count(rng, self.least, self.most), apart=question)
        return Example(
            context=numbered(passages),
            exchange=Exchange(question.text, question.reply),
            answer=question.answer,
            kind=question.kind,
            gold=_gold(passages, question),
            more=self._more(rng, plan.stated, level, sort),
            documents=accounts(passages),
        )

    def _due(self, index: int) -> Sort:
        """The sort of row `index`, such that any range of rows has all sorts by their shares."""
        place = index * _GOLDEN % 1 * sum(sort.share for sort in self.sorts)
        ends = accumulate(sort.share for sort in self.sorts)
        return next(sort for sort, end in zip(self.sorts, ends, strict=True) if place < end)

    def _more(
        self, rng: Random, stated: StatedFacts, level: Level, sort: Sort
    ) -> tuple[Exchange, ...]:
        """Further questions, half of them of the sort that the context was made for."""
        found = (self._another(rng, stated, level, sort) for _ in range(level.more))
        by_text = {question.text: question for question in found if question}
        return tuple(Exchange(text, question.reply) for text, question in by_text.items())

    def _another(
        self, rng: Random, stated: StatedFacts, level: Level, sort: Sort
    ) -> Question | None:
        if rng.random() < level.simple:
            return chain(rng, stated, hops=1)
        return rng.choice((sort, rng.choice(self.sorts))).more(rng, stated)


def _gold(passages: Sequence[Passage], question: Question) -> tuple[int, ...]:
    needed = set(question.facts)
    return tuple(i for i, passage in enumerate(passages) if needed & set(passage.facts))


def _same(rng: Random, stated: StatedFacts) -> Question | None:
    return same(rng, stated, wanted=rng.random() < 0.5)


def _hops(share: float, hops: int) -> Sort:
    return Sort(share, partial(plant_chain, hops=hops), partial(chain, hops=hops))


#: Two to four hops over up to twenty passages.
musique = PassageQuestions((_hops(0.5, 2), _hops(0.3, 3), _hops(0.2, 4)), least=6, most=20)

#: Bridge, inference and comparison.
wikimqa = PassageQuestions(
    (
        _hops(0.5, 2),
        Sort(0.38, plant_kinship, kinship),
        Sort(0.06, plant_comparison, comparison),
        Sort(0.06, plant_bridge_comparison, bridge_comparison),
    ),
    least=6,
    most=10,
)

#: Two gold passages among ten; spans, yes or no.
hotpotqa = PassageQuestions(
    (_hops(0.9, 2), Sort(0.05, plant_comparison, comparison), Sort(0.05, plant_same, _same)),
    least=8,
    most=10,
)
