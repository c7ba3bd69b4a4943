"""Needle in a haystack: one remark about a person at a set depth of a text of a set length."""

from dataclasses import dataclass
from random import Random

from picbench.workloads.testbed import names
from picbench.workloads.testbed.example import Example, Level, Turn
from picbench.workloads.testbed.fillers import aside
from picbench.workloads.testbed.names import Split
from picbench.workloads.testbed.reply import compose

#: The grid: lengths in words (a word has about 1.3 tokens), and depths.
LENGTHS = (400, 800, 1200, 1600, 2000, 2400, 2800, 3200)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_SECRETS = (
    "lucky number",
    "locker number",
    "room number",
    "password",
    "first horse",
    "secret garden",
    "favourite dog",
)
_REMARKS = (
    "The {secret} of {person} is {value}.",
    "{person}'s {secret} is {value}.",
    "Remember that the {secret} of {person} is {value}.",
    "By the way, {value} is the {secret} of {person}.",
)
_QUESTIONS = ("What is the {secret} of {person}?", "What is {person}'s {secret}?")
_PARAGRAPH = 6


@dataclass(frozen=True, slots=True)
class _Secret:
    secret: str
    person: str
    value: str

    def remark(self, rng: Random) -> str:
        return rng.choice(_REMARKS).format(
            secret=self.secret, person=self.person, value=self.value
        )

    def turn(self, rng: Random) -> Turn:
        question = rng.choice(_QUESTIONS).format(secret=self.secret, person=self.person)
        return Turn(question, compose([f"{self.secret} of {self.person} is {self.value}"]))


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example on cell `index` of the grid; other secrets stand at other depths."""
    length = LENGTHS[index // len(DEPTHS) % len(LENGTHS)] * level.scale
    depth = DEPTHS[index % len(DEPTHS)]
    secrets = _secrets(rng, split, 3 + level.more)
    hay = _hay(rng, round(length))
    for other in secrets[1:]:
        hay.insert(rng.randrange(len(hay) + 1), other.remark(rng))
    hay.insert(round(depth * len(hay)), secrets[0].remark(rng))
    asked, *more = (secret.turn(rng) for secret in secrets)
    return Example(_paragraphs(hay), asked, secrets[0].value, "needle", more=tuple(more))


def _secrets(rng: Random, split: Split, count: int) -> list[_Secret]:
    """Secrets of different people, some of whom share a family name."""
    people: dict[str, None] = {}
    while len(people) < count:
        like = rng.choice(tuple(people)) if people and rng.random() < 0.3 else None
        person = names.person_name(rng, rng.choice(("woman", "man")), like)
        if names.split_of(person) == split:
            people[person] = None
    secrets = (rng.choice(_SECRETS) for _ in people)
    return [_Secret(secret, who, _value(rng, secret)) for secret, who in zip(secrets, people)]


def _value(rng: Random, secret: str) -> str:
    if secret.endswith("number"):
        return str(rng.randrange(100, 1000))
    return rng.choice(names.RIVERS)


def _hay(rng: Random, words: int) -> list[str]:
    hay: list[str] = []
    while words > 0:
        hay.append(aside(rng))
        words -= len(hay[-1].split())
    return hay


def _paragraphs(sentences: list[str]) -> str:
    starts = range(0, len(sentences), _PARAGRAPH)
    return "\n".join(" ".join(sentences[start : start + _PARAGRAPH]) for start in starts)
