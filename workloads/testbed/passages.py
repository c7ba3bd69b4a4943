"""Passages about one entity each, in the manner of an encyclopaedia."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from picbench.workloads.testbed.fillers import aside, remark
from picbench.workloads.testbed.relations import PERSON, RELATIONS, WORK, Form
from picbench.workloads.testbed.world import Entity, Fact

#: Fewest and most words of a body, which makes 60 to 200 tokens with the title.
WORDS = (46, 95)

_PRONOUNS: MappingProxyType[Form, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "woman": (("She", "Her"),),
        "man": (("He", "His"),),
        "town": (("It", "Its"), ("The town", "The town's")),
        "country": (("It", "Its"), ("The country", "The country's")),
        "film": (("It", "Its"), ("The film", "The film's")),
        "novel": (("It", "Its"), ("The novel", "The novel's")),
        "opera": (("It", "Its"), ("The opera", "The opera's")),
        "company": (("It", "Its"), ("The company", "The company's")),
        "university": (("It", "Its"), ("The university", "The university's")),
        "studio": (("It", "Its"), ("The studio", "The studio's")),
    }
)
_OPENINGS: MappingProxyType[Form, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            PERSON,
            (
                "{name} is remembered in several local histories.",
                "{name} has been the subject of two short biographies.",
                "{name} was a person of many talents.",
            ),
        ),
        **dict.fromkeys(
            WORK,
            (
                "{name} divided its critics.",
                "{name} is a widely known {form} in three parts.",
                "{name} is a widely discussed {form}.",
            ),
        ),
        "town": ("{name} is a place of some charm.", "{name} is an old settlement."),
        "country": ("{name} is a country of hills and lakes.", "{name} is a small country."),
        "company": ("{name} is a company.", "{name} is a family company."),
        "university": ("{name} is a place of learning.", "{name} is a university."),
        "studio": ("{name} is a studio.", "{name} is a house for books and films."),
    }
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A title, a body, and the facts that the body states."""

    title: str
    body: str
    facts: tuple[Fact, ...]

    def __str__(self) -> str:
        return f"{self.title}\n{self.body}"


@dataclass(frozen=True, slots=True)
class Manner:
    """How plainly a passage is written: probabilities from 0 to 1.

    `literal` is that a fact is said as "The R of E is V"; `named` that a subject is named in full
    where a pronoun would do.
    """

    literal: float = 0.15
    named: float = 0.5


def write(
    rng: Random, subject: Entity, facts: Sequence[Fact], manner: Manner, words: int = 0
) -> Passage:
    """Write a passage about `subject` that states `facts` in a random order.

    Facts about other entities always name them. `words` is how long the body should be at least;
    0 draws a length.
    """
    wanted = words or rng.randrange(*WORDS)
    opening = rng.choice(_OPENINGS[subject.form]).format(name=subject.name, form=subject.form)
    said = [state(rng, fact, subject, manner) for fact in facts]
    length = len(opening.split()) + sum(len(sentence.split()) for sentence in said)
    while length < wanted:
        said.append(_filler(rng, subject, manner))
        length += len(said[-1].split())
    rng.shuffle(said)
    return Passage(subject.name, " ".join((opening, *said)), tuple(facts))


def state(rng: Random, fact: Fact, topic: Entity, manner: Manner) -> str:
    """Say one fact in a passage about `topic`."""
    statements = RELATIONS[fact.relation].statements
    literal = rng.random() < manner.literal
    template = statements[-1] if literal else rng.choice(statements)
    return _name_subject(rng, template, fact.subject, topic, manner).replace(
        "{o}", fact.object.name
    )


def numbered(passages: Iterable[Passage]) -> str:
    """The context of a row: ``Passage i:``, title and body, in order."""
    return "\n".join(f"Passage {i}:\n{passage}" for i, passage in enumerate(passages, start=1))


def _filler(rng: Random, subject: Entity, manner: Manner) -> str:
    if rng.random() < 0.5:
        return aside(rng)
    return _name_subject(rng, remark(rng, subject.form), subject, subject, manner)


def _name_subject(
    rng: Random, template: str, subject: Entity, topic: Entity, manner: Manner
) -> str:
    if subject is topic and template.startswith("{s}") and rng.random() >= manner.named:
        subjective, possessive = rng.choice(_PRONOUNS[subject.form])
        if template.startswith("{s}'s"):
            return possessive + template[5:]
        template = subjective + template[3:]
    return template.replace("{s}", subject.name)
