"""Several news articles, and a summary with one sentence about each."""

from collections.abc import Mapping
from random import Random
from typing import Any

from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.names import Split
from picbench.workloads.synthetic.passages import WORDS, Passage, accounts, aside, numbered
from picbench.workloads.synthetic.world import Form, World
from picbench.workloads.yaml_data import read_data

#: Fewest and most articles.
ARTICLES = (3, 8)


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example with one story an article; the summary tells them in order.

    An article begins with the person and the town, unless it follows up on the article before.
    """
    world = World(rng, split)
    lead: dict[str, str] = {}
    articles: list[Passage] = []
    summary: list[str] = []
    for story in rng.sample(_said("stories"), level.count(rng, *ARTICLES)):
        follows = bool(lead) and rng.random() < level.manner.cut
        lead = lead if follows else _lead(rng, world)
        number = str(rng.randrange(11, 1000))
        articles.append(_article(rng, story, number, None if follows else lead))
        summary.append(story["summary"].format(n=number, **lead))
    told = " ".join(summary)
    return Example(
        context=numbered(articles),
        exchange=Exchange("", told),
        answer=told,
        kind="summary",
        gold=tuple(range(len(articles))),
        documents=accounts(articles),
    )


def _lead(rng: Random, world: World) -> dict[str, str]:
    person: Form = rng.choice(("woman", "man"))
    return {
        "town": world.add("town").name,
        "person": world.add(person).name,
        "org": world.add("company").name,
    }


def _article(
    rng: Random, story: Mapping[str, Any], number: str, lead: dict[str, str] | None
) -> Passage:
    opening = rng.choice(_said("leads")).format(**lead) if lead else ""
    body = [rng.choice(story["reports"]).format(n=number), rng.choice(_said("quotes"))]
    length = sum(len(sentence.split()) for sentence in (opening, *body))
    wanted = rng.randrange(*WORDS)
    while length < wanted:
        body.append(aside(rng))
        length += len(body[-1].split())
    rng.shuffle(body)
    title = story["headline"] if lead else f"Continued: {story['headline']}"
    return Passage(title, " ".join([opening, *body] if lead else body), continues=not lead)


def _said(what: str) -> Any:
    return read_data("synthetic", "multi_news")[what]
