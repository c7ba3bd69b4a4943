"""The facts that the passages of one context state."""

from collections.abc import Iterable, Sequence

from picbench.workloads.synthetic.world.world import Entity, Fact


class StatedFacts:
    """Facts, found by subject, by relation, or by both."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self._about: dict[Entity, list[Fact]] = {}
        self._of: dict[str, list[Fact]] = {}
        self._by_key: dict[tuple[Entity, str], Fact] = {}
        for fact in self.facts:
            self._about.setdefault(fact.subject, []).append(fact)
            self._of.setdefault(fact.relation, []).append(fact)
            self._by_key[fact.subject, fact.relation] = fact

    def about(self, subject: Entity) -> Sequence[Fact]:
        """The facts about `subject`."""
        return self._about.get(subject, ())

    def of(self, relation: str) -> Sequence[Fact]:
        """The facts that say what the `relation` of something is."""
        return self._of.get(relation, ())

    def find(self, subject: Entity, relation: str) -> Fact | None:
        """The fact that says what the `relation` of `subject` is."""
        return self._by_key.get((subject, relation))
