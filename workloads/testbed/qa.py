"""What the three question-answering generators have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from picbench.workloads.testbed.example import Example, Level, Turn
from picbench.workloads.testbed.names import Split
from picbench.workloads.testbed.passages import Passage, numbered
from picbench.workloads.testbed.questions import Question, chain
from picbench.workloads.testbed.scene import Scene
from picbench.workloads.testbed.stated import Stated


@dataclass(frozen=True, slots=True)
class Sort:
    """A sort of question: its share, how to plant one, how to find more in the same context."""

    share: float
    plant: Callable[[Random, Scene], Question]
    more: Callable[[Random, Stated], Question | None]


@dataclass(frozen=True, slots=True)
class Generator:
    """Makes contexts of `least` to `most` passages and asks questions of these sorts."""

    sorts: tuple[Sort, ...]
    least: int
    most: int

    def __call__(self, rng: Random, split: Split, index: int, level: Level) -> Example:
        """Make an example; see `example.Make`."""
        scene = Scene(rng, split)
        question = self._sort(rng).plant(rng, scene)
        scene.fill(level.count(rng, self.least, self.most))
        passages = scene.write(level.manner, apart=question)
        return Example(
            context=numbered(passages),
            turn=Turn(question.text, question.reply),
            answer=question.answer,
            kind=question.kind,
            gold=_gold(passages, question),
            more=self._more(rng, scene.stated, level),
        )

    def _sort(self, rng: Random) -> Sort:
        return rng.choices(self.sorts, [sort.share for sort in self.sorts])[0]

    def _more(self, rng: Random, stated: Stated, level: Level) -> tuple[Turn, ...]:
        found = (self._another(rng, stated, level.simple) for _ in range(level.more))
        by_text = {question.text: question for question in found if question}
        return tuple(Turn(text, question.reply) for text, question in by_text.items())

    def _another(self, rng: Random, stated: Stated, simple: float) -> Question | None:
        if rng.random() < simple:
            return chain(rng, stated, hops=1)
        return self._sort(rng).more(rng, stated)


def _gold(passages: Sequence[Passage], question: Question) -> tuple[int, ...]:
    needed = set(question.facts)
    return tuple(i for i, passage in enumerate(passages) if needed & set(passage.facts))
