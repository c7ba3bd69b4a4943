"""Passages about one entity each, in the manner of an encyclopaedia.

Between the facts stand fillers, sentences that carry none: the hay around the needles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from random import Random
from string import Formatter
from types import MappingProxyType
from typing import Any

from picbench.workloads.synthetic.world import (
    ORGANISATION,
    PERSON,
    WORK,
    Entity,
    Fact,
    Form,
    relations,
)
from picbench.workloads.yaml_data import read_data

#: Fewest and most words of a body, which makes 60 to 200 tokens with the title.
WORDS = (46, 95)

#: What fillers about a subject of each form are called; others have none.
_FILLERS: Mapping[Form, str] = MappingProxyType(
    {
        **dict.fromkeys(PERSON, "person"),
        **dict.fromkeys(WORK, "work"),
        **dict.fromkeys(ORGANISATION, "organisation"),
        **dict.fromkeys(("town", "country"), "place"),
    }
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A title, a body, and the facts that the body states; `continues` the passage before it."""

    title: str
    body: str
    facts: tuple[Fact, ...] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Manner:
    """The style of passages, as probabilities from 0 to 1.

    `literal` is for stating a fact as "The R of E is V"; `named` for the full name of a subject
    instead of a pronoun; `cut` for splitting an account into two passages, of which the second
    does not name its subject.
    """

    literal: float = 0.15
    named: float = 0.5
    cut: float = 0.75


_NAMELESS = Manner(named=0.0)
# Share of continuations that do not begin with their facts.
_AIMLESS = 0.3


def write(rng: Random, subject: Entity, facts: Sequence[Fact], manner: Manner) -> Passage:
    """Write a passage about `subject` that states `facts` in a random order."""
    opening = rng.choice(_said("openings")[subject.form]).format(
        name=subject.name, form=subject.form
    )
    said = [_state(rng, fact, manner) for fact in facts]
    said += _fillers(rng, subject, manner, [opening, *said])
    rng.shuffle(said)
    return Passage(subject.name, " ".join([opening, *said]), tuple(facts))


def write_on(rng: Random, subject: Entity, facts: Sequence[Fact]) -> Passage:
    """Write the continuation of the passage about `subject`, without naming it.

    Most begin with the facts.
    """
    said = [_state(rng, fact, _NAMELESS) for fact in facts]
    rng.shuffle(said)
    said += _fillers(rng, subject, _NAMELESS, said)
    if rng.random() < _AIMLESS:
        rng.shuffle(said)
    return Passage(rng.choice(continuations()), " ".join(said), tuple(facts), continues=True)


def mention(rng: Random, passage: Passage, fact: Fact) -> Passage:
    """Add a sentence with a fact about another entity to the end of a passage."""
    template = rng.choice(relations()[fact.relation].statements)
    said = template.replace("{s}", fact.subject.name).replace("{o}", fact.object.name)
    return replace(passage, body=f"{passage.body} {said}", facts=(*passage.facts, fact))


def accounts(passages: Sequence[Passage]) -> tuple[int, ...]:
    """The number of the account that each passage is from: its own, or that of the one before."""
    return tuple(accumulate(int(number and not p.continues) for number, p in enumerate(passages)))


def numbered(passages: Sequence[Passage]) -> str:
    """The context of a row: ``Passage i:``, title and body, in order."""
    return "\n".join(
        f"Passage {number}:\n{passage.title}\n{passage.body}"
        for number, passage in enumerate(passages, start=1)
    )


def aside(rng: Random) -> str:
    """A sentence without a subject of the world."""
    return _fill(rng, rng.choice(_said("fillers")["anything"]))


def continuations() -> Sequence[str]:
    """Titles of passages that continue the one before."""
    titles: Sequence[str] = _said("continuations")
    return titles


def _state(rng: Random, fact: Fact, manner: Manner) -> str:
    """Say a fact about the subject of a passage."""
    statements = relations()[fact.relation].statements
    if not manner.named:
        statements = tuple(filter(_begins_with_subject, statements))
    elif rng.random() < manner.literal:
        statements = statements[-1:]
    said = _name(rng, rng.choice(statements), fact.subject, manner)
    return said.replace("{o}", fact.object.name)


def _fillers(rng: Random, subject: Entity, manner: Manner, said: Sequence[str]) -> list[str]:
    """Sentences without facts, until a body that has `said` is long enough."""
    missing = rng.randrange(*WORDS) - sum(len(sentence.split()) for sentence in said)
    found: list[str] = []
    while missing > 0:
        found.append(_filler(rng, subject, manner))
        missing -= len(found[-1].split())
    return found


def _filler(rng: Random, subject: Entity, manner: Manner) -> str:
    template = _remark(rng, subject.form) if rng.random() < 0.5 else ""
    if not template or not (manner.named or _begins_with_subject(template)):
        return aside(rng)
    return _name(rng, template, subject, manner)


def _begins_with_subject(template: str) -> bool:
    return template.startswith("{s}")


def _name(rng: Random, template: str, subject: Entity, manner: Manner) -> str:
    """Put the name of the subject into a template, or a pronoun at its beginning."""
    if _begins_with_subject(template) and rng.random() >= manner.named:
        pronouns: tuple[str, str] = rng.choice(_said("pronouns")[subject.form])
        subjective, possessive = pronouns
        if template.startswith("{s}'s"):
            return possessive + template[5:]
        template = subjective + template[3:]
    return template.replace("{s}", subject.name)


def _remark(rng: Random, form: Form) -> str:
    """A sentence about a subject of this form, with `{s}` left in for its name."""
    return _fill(rng, rng.choice(_said("fillers")[_FILLERS[form]]))


def _fill(rng: Random, template: str) -> str:
    text, fields = _compiled(template)
    return text % tuple(rng.choice(_filler_words()[field]) for field in fields)


@cache
def _compiled(template: str) -> tuple[str, tuple[str, ...]]:
    """The template with `%s` for the fields that are drawn, and the names of these."""
    parsed = [(literal, field or "") for literal, field, _, _ in Formatter().parse(template)]
    drawn = tuple(field for _, field in parsed if field in _filler_words())
    kept = (literal + _placeholder(field) for literal, field in parsed)
    return "".join(kept), drawn


def _placeholder(field: str) -> str:
    if field in _filler_words():
        return "%s"
    return f"{{{field}}}" if field else ""


def _filler_words() -> Mapping[str, Sequence[str]]:
    words: Mapping[str, Sequence[str]] = read_data("synthetic", "words")["filler"]
    return words


def _said(what: str) -> Any:
    return read_data("synthetic", "passages")[what]
