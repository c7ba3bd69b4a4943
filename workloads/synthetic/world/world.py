"""A small consistent world: entities and the facts between them.

Every row has a new world, so that no fact can be memorised. Facts are functional (one object for
a subject and a relation) and consistent: marriage is symmetric, a capital is in its country,
parents and teachers are older than children and pupils.
"""

from collections.abc import Callable
from random import Random
from types import MappingProxyType

from picbench.workloads.synthetic.world import invented_names
from picbench.workloads.synthetic.world.entities import (
    ORGANISATION,
    PERSON,
    WORK,
    Entity,
    Fact,
    Form,
)
from picbench.workloads.synthetic.world.invented_names import Split, words
from picbench.workloads.synthetic.world.relations import RELATIONS

TRADES = words(
    "painter surgeon baker carpenter lawyer teacher sculptor gardener chemist printer sailor "
    "tailor banker journalist geologist farmer pilot librarian dentist violinist watchmaker "
    "blacksmith photographer mathematician"
)
COINS = words("crown florin dinar thaler mark peso guilder rupee shilling lira krone ducat")

_YEARS = MappingProxyType(
    {
        **dict.fromkeys(PERSON, (1860, 1970)),
        **dict.fromkeys(WORK, (1900, 2000)),
        **dict.fromkeys(ORGANISATION, (1880, 2000)),
        "town": (1700, 1860),
    }
)
_FRESH = 1000

#: The probability that a fact's object is an entity that exists already.
_KNOWN = 0.7


class World:
    """Entities and facts, made on demand."""

    def __init__(self, rng: Random, split: Split) -> None:
        self._rng = rng
        self._split = split
        self._by_form: dict[Form, list[Entity]] = {}
        self._facts: dict[tuple[Entity, str], Fact] = {}
        self._kin: set[tuple[Entity, Entity]] = set()
        self._taken: set[str] = set()

    def add(self, form: Form, year: int | None = None, like: Entity | None = None) -> Entity:
        """Add an entity with a name that is new here, if possible one that resembles `like`."""
        name = self._name(form, like.name if like else None)
        if year is None:
            year = self._rng.randrange(*_YEARS.get(form, (0, 1)))
        entity = Entity(name, form, year)
        self._by_form.setdefault(form, []).append(entity)
        return entity

    def fact(self, subject: Entity, relation: str) -> Fact:
        """Return the fact that answers "what is the `relation` of `subject`?"."""
        known = self._facts.get((subject, relation))
        return known or self.add_fact(subject, relation, self._object(subject, relation))

    def new_fact(self, subject: Entity, relation: str) -> Fact:
        """Make a fact that does not exist yet, with a new entity as its object."""
        known = self._facts.get((subject, relation))
        return known or self.add_fact(subject, relation, self._object(subject, relation, 0.0))

    def add_fact(self, subject: Entity, relation: str, found: Entity) -> Fact:
        """Make `found` the `relation` of `subject`, which must have none yet."""
        fact = self._facts[subject, relation] = Fact(subject, relation, found)
        self._kin |= {(subject, found), (found, subject)}
        if relation == "spouse":
            self._facts[found, "spouse"] = Fact(found, "spouse", subject)
        elif relation == "capital":
            self._facts[found, "country"] = Fact(found, "country", subject)
        return fact

    def has_fact(self, subject: Entity, relation: str) -> bool:
        """Whether `subject` has this relation."""
        return (subject, relation) in self._facts

    def _name(self, form: Form, like: str | None) -> str:
        make = _MAKERS[form]
        for attempt in range(_FRESH):
            name = make(self._rng, form, like if attempt < 3 else None)
            if name not in self._taken and invented_names.split_of(name) == self._split:
                self._taken.add(name)
                return name
        raise RuntimeError(f"no name is left for a {form}")

    def _object(self, subject: Entity, relation: str, known: float = _KNOWN) -> Entity:
        """An object, with the probability `known` an entity that exists already, if one fits."""
        forms = RELATIONS[relation].objects
        if forms == ("year",):
            return Entity(str(subject.year), "year")
        if forms == ("trade",):
            return Entity(self._rng.choice(TRADES), "trade")
        if forms == ("coin",):
            return Entity(self._rng.choice(COINS), "coin")
        if forms == ("tongue",):
            return Entity(self._rng.choice(invented_names.LANGUAGES), "tongue")
        if self._rng.random() < known:
            fitting = self._fitting(subject, relation)
            if fitting:
                return self._rng.choice(fitting)
        return self.add(self._rng.choice(forms), self._year_for(subject, relation))

    def _fitting(self, subject: Entity, relation: str) -> list[Entity]:
        wanted = RELATIONS[relation]
        latest = 9999 if wanted.elder is None else subject.year - wanted.elder
        return [
            entity
            for form in wanted.objects
            for entity in self._by_form.get(form, ())
            if entity.year <= latest and self._free(subject, relation, entity)
        ]

    def _free(self, subject: Entity, relation: str, entity: Entity) -> bool:
        """Whether `entity` is unrelated to `subject`, and the fact's mirror image is new."""
        mirror = {"spouse": "spouse", "capital": "country"}.get(relation)
        return (
            entity is not subject
            and (subject, entity) not in self._kin
            and (mirror is None or (entity, mirror) not in self._facts)
        )

    def _year_for(self, subject: Entity, relation: str) -> int | None:
        elder = RELATIONS[relation].elder
        return None if elder is None else subject.year - elder - self._rng.randrange(15)


_Maker = Callable[[Random, Form, str | None], str]


def _plain(make: Callable[[Random], str]) -> _Maker:
    return lambda rng, form, like: make(rng)


_MAKERS: MappingProxyType[Form, _Maker] = MappingProxyType(
    {
        **dict.fromkeys(PERSON, invented_names.person_name),
        **dict.fromkeys(WORK, _plain(invented_names.title)),
        **dict.fromkeys(ORGANISATION, invented_names.organisation_name),
        "town": _plain(invented_names.town_name),
        "country": _plain(invented_names.country_name),
        "river": _plain(lambda rng: rng.choice(invented_names.RIVERS)),
    }
)
