"""Several articles on what happened in one town, and a summary that draws on each of them."""

from dataclasses import dataclass
from random import Random

from picbench.workloads.testbed.example import Example, Level, Turn
from picbench.workloads.testbed.fillers import aside
from picbench.workloads.testbed.names import Split
from picbench.workloads.testbed.passages import WORDS, Passage, numbered
from picbench.workloads.testbed.relations import Form
from picbench.workloads.testbed.world import World

#: Fewest and most articles.
ARTICLES = (3, 8)


@dataclass(frozen=True, slots=True)
class _Story:
    """An event: headline, ways to report it, and the sentence of the summary."""

    headline: str
    reports: tuple[str, ...]
    summary: str


_STORIES = (
    _Story(
        "Fire in {town}",
        (
            "Flames destroyed {n} houses near the {org} building in {town}.",
            "In {town}, {n} houses next to {org} burned to the ground.",
            "Owners of {n} houses close to {org} lost everything when {town} burned.",
        ),
        "A fire in {town} destroyed {n} houses near {org}.",
    ),
    _Story(
        "Workers walk out",
        (
            "Some {n} workers of {org} laid down their tools, led by {person}.",
            "{person} called {n} workers of {org} out on strike.",
            "At {org}, {n} workers followed {person} and stopped work.",
        ),
        "{person} led {n} workers of {org} on strike.",
    ),
    _Story(
        "A close vote",
        (
            "{person} won the election in {town} by {n} votes.",
            "With {n} votes more than the rival, {person} carried the election in {town}.",
            "Only {n} votes made {person} the winner of the election in {town}.",
        ),
        "{person} won an election in {town} by {n} votes.",
    ),
    _Story(
        "Museum robbed",
        (
            "Thieves took {n} paintings by {person} from the museum of {town}.",
            "The museum of {town} misses {n} paintings by {person} since the theft.",
            "Gone are {n} paintings by {person}, stolen from the museum of {town}.",
        ),
        "Thieves stole {n} paintings by {person} from the museum of {town}.",
    ),
    _Story(
        "Takeover agreed",
        (
            "{org} will buy {other} for {n} million.",
            "The owners of {other} accepted {n} million from {org}.",
            "For {n} million, {other} goes to {org}.",
        ),
        "{org} buys {other} for {n} million.",
    ),
    _Story(
        "New head",
        (
            "{person} takes over at {org} after {n} days without a head.",
            "{org} was without a head for {n} days; now {person} has the post.",
            "After {n} days, {org} found a new head in {person}.",
        ),
        "{person} becomes head of {org} after {n} days.",
    ),
    _Story(
        "Verdict reached",
        (
            "A judge in {town} sent {person} to prison for {n} days.",
            "{person} must spend {n} days in prison, a court in {town} decided.",
            "The court in {town} gave {person} {n} days behind bars.",
        ),
        "A court in {town} sent {person} to prison for {n} days.",
    ),
    _Story(
        "Children saved",
        (
            "{person} pulled {n} children out of the river at {town}.",
            "At {town}, {n} children owe their lives to {person}, who went into the river.",
            "When the boat sank at {town}, {person} saved {n} children.",
        ),
        "{person} saved {n} children from the river at {town}.",
    ),
    _Story(
        "Doors open",
        (
            "{org} opened a hall for {n} guests in {town}.",
            "In {town}, {org} now has a hall with room for {n} guests.",
            "A hall of {org} that seats {n} guests opened in {town}.",
        ),
        "{org} opened a hall for {n} guests in {town}.",
    ),
    _Story(
        "March through the streets",
        (
            "Behind {person}, {n} people marched through {town}.",
            "{person} walked at the head of {n} people through {town}.",
            "The streets of {town} saw {n} people march behind {person}.",
        ),
        "{n} people marched through {town} behind {person}.",
    ),
    _Story(
        "Water rises",
        (
            "The flood drove {n} people in {town} from their beds, {person} said.",
            "{person} counted {n} people without a home after the flood in {town}.",
            "After the flood in {town}, {n} people have no home, according to {person}.",
        ),
        "A flood left {n} people in {town} without a home, {person} said.",
    ),
    _Story(
        "A gift",
        (
            "{person} gave {n} books to the library of {town}.",
            "The library of {town} received {n} books from {person}.",
            "Shelves for {n} books are needed in {town}, all of them a gift of {person}.",
        ),
        "{person} gave {n} books to the library of {town}.",
    ),
)
_QUOTES = (
    '"We did not expect this," said one of those who were there.',
    '"It will take time," an official said.',
    "The mayor declined to comment.",
    "A spokesman promised to answer questions later.",
    "More details are expected in the coming days.",
    "It was the talk of the town the next morning.",
)


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example with one story an article; the summary tells them in order."""
    world = World(rng, split)
    towns = [world.add("town").name for _ in range(2)]
    stories = rng.sample(_STORIES, level.count(rng, *ARTICLES))
    told = [_article(rng, world, story, rng.choice(towns)) for story in stories]
    summary = " ".join(sentence for _, sentence in told)
    context = numbered(article for article, _ in told)
    return Example(context, Turn("", summary), summary, "summary", tuple(range(len(told))))


def _article(rng: Random, world: World, story: _Story, town: str) -> tuple[Passage, str]:
    person: Form = rng.choice(("woman", "man"))
    facts = {
        "town": town,
        "person": world.add(person).name,
        "org": world.add("company").name,
        "other": world.add("company").name,
        "n": str(rng.randrange(11, 1000)),
    }
    body = [rng.choice(story.reports).format(**facts), rng.choice(_QUOTES)]
    length = sum(len(sentence.split()) for sentence in body)
    wanted = rng.randrange(*WORDS)
    while length < wanted:
        body.append(aside(rng))
        length += len(body[-1].split())
    rng.shuffle(body)
    title = story.headline.format(**facts)
    return Passage(title, " ".join(body), ()), story.summary.format(**facts)
