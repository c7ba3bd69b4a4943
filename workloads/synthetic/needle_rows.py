"""Needle in a haystack: one remark about a person at a set depth of a text of a set length."""

from dataclasses import dataclass
from random import Random
from typing import Any

from picbench.workloads.synthetic import names
from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.names import Split
from picbench.workloads.synthetic.passages import Manner, aside
from picbench.workloads.synthetic.reply import compose
from picbench.workloads.yaml_data import read_data

#: The grid: lengths in words (a word has about 1.5 tokens), and depths.
LENGTHS = (550, 800, 1050, 1300, 1600, 1850, 2100, 2350)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

#: Sentences of a paragraph, about how many words these are, and paragraphs of a section.
_SENTENCES, _WORDS, _PARAGRAPHS = 5, 43, (9, 14)
_SECRETS_EACH = 2
_RELATED = 0.3


@dataclass(frozen=True, slots=True)
class _Secret:
    name: str
    person: str
    value: str

    def remark(self, rng: Random, unnamed: float) -> str:
        template: str = rng.choice(_said("unnamed" if rng.random() < unnamed else "named"))
        return template.format(secret=self.name, person=self.person, value=self.value)

    def exchange(self, rng: Random) -> Exchange:
        question = rng.choice(_said("questions")).format(secret=self.name, person=self.person)
        return Exchange(question, compose([f"{self.name} of {self.person} is {self.value}"]))


@dataclass(frozen=True, slots=True)
class _Section:
    """A section about a person: paragraphs of sentences, and the person's secrets."""

    number: int
    person: str
    paragraphs: list[list[str]]
    secrets: list[_Secret]

    def __str__(self) -> str:
        lines = (
            f"{self.number}.{number} {' '.join(sentences)}"
            for number, sentences in enumerate(self.paragraphs, start=1)
        )
        return "\n".join((f"Section {self.number}: {self.person}", *lines))


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example on cell `index` of the grid.

    The text has numbered sections, each with a person's name as its heading and some secrets of
    that person; the secret of the question is at the depth of the cell.
    """
    length = LENGTHS[index // len(DEPTHS) % len(LENGTHS)] * level.scale
    sections = _sections(rng, split, max(2, round(length / _WORDS)))
    places = [(section, i) for section in sections for i in range(len(section.paragraphs))]
    chosen, place = places[round(DEPTHS[index % len(DEPTHS)] * (len(places) - 1))]
    # A remark without a name is about the person in the heading of its section.
    unnamed = level.manner.cut / Manner().cut
    for section in sections:
        for number, secret in enumerate(section.secrets):
            asked = section is chosen and number == 0
            paragraph = section.paragraphs[place] if asked else rng.choice(section.paragraphs)
            paragraph.insert(rng.randrange(len(paragraph) + 1), secret.remark(rng, unnamed))
    others = [s for section in sections for s in section.secrets if s is not chosen.secrets[0]]
    more = rng.sample(others, min(level.more, len(others)))
    return Example(
        context="\n".join(map(str, sections)),
        exchange=chosen.secrets[0].exchange(rng),
        answer=chosen.secrets[0].value,
        kind="needle",
        more=tuple(secret.exchange(rng) for secret in more),
    )


def _sections(rng: Random, split: Split, paragraphs: int) -> list[_Section]:
    sections: list[_Section] = []
    people: list[str] = []
    kinds = rng.sample(_said("secrets"), _SECRETS_EACH)
    while paragraphs > 0:
        people.append(_newcomer(rng, split, people))
        size = min(paragraphs, rng.randint(*_PARAGRAPHS))
        paragraphs -= size
        texts = [[aside(rng) for _ in range(_SENTENCES)] for _ in range(size)]
        secrets = _secrets(rng, people[-1], rng.sample(kinds, len(kinds)))
        sections.append(_Section(len(people), people[-1], texts, secrets))
    return sections


def _newcomer(rng: Random, split: Split, people: list[str]) -> str:
    """A new person, who may share a family name with another."""
    while True:
        like = rng.choice(people) if people and rng.random() < _RELATED else None
        person = names.person_name(rng, rng.choice(("woman", "man")), like)
        if names.split_of(person) == split and person not in people:
            return person


def _secrets(rng: Random, person: str, kinds: list[str]) -> list[_Secret]:
    return [_Secret(kind, person, _value(rng, kind)) for kind in kinds]


def _value(rng: Random, kind: str) -> str:
    if kind.endswith("number"):
        return str(rng.randrange(100, 1000))
    return rng.choice(names.words("rivers"))


def _said(what: str) -> Any:
    return read_data("synthetic", "needle")[what]
