"""Several news articles, and a summary with one sentence about each."""

from dataclasses import dataclass
from random import Random

from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.world.entities import Form
from picbench.workloads.synthetic.world.fillers import aside
from picbench.workloads.synthetic.world.invented_names import Split
from picbench.workloads.synthetic.world.passages import WORDS, Passage, accounts, numbered
from picbench.workloads.synthetic.world.world import World

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
        "Fire",
        (
            "Flames destroyed {n} houses near the firm.",
            "Next to the firm, {n} houses burned to the ground.",
            "The owners of {n} houses close to the firm lost everything in the flames.",
        ),
        "A fire destroyed {n} houses near {org} in {town}.",
    ),
    _Story(
        "Workers walk out",
        (
            "Some {n} workers laid down their tools.",
            "A call to strike was followed by {n} workers.",
            "Since Monday {n} workers have stopped work.",
        ),
        "{person} led {n} workers of {org} on strike.",
    ),
    _Story(
        "A close vote",
        (
            "The election was won by {n} votes.",
            "Just {n} votes decided the election.",
            "The rival was {n} votes behind when the election was over.",
        ),
        "{person} won an election in {town} by {n} votes.",
    ),
    _Story(
        "Museum robbed",
        (
            "Thieves took {n} paintings from the museum.",
            "The museum misses {n} paintings since the theft.",
            "Gone are {n} paintings that hung in the museum.",
        ),
        "Thieves stole {n} paintings of {person} from the museum of {town}.",
    ),
    _Story(
        "Takeover agreed",
        (
            "The firm was sold for {n} million.",
            "A buyer paid {n} million for the firm.",
            "For {n} million, the firm has a new owner.",
        ),
        "{person} buys {org} for {n} million.",
    ),
    _Story(
        "New head",
        (
            "After {n} days without a head, the firm has filled the post.",
            "The firm was without a head for {n} days.",
            "It took {n} days to find a new head for the firm.",
        ),
        "{person} becomes head of {org} after {n} days.",
    ),
    _Story(
        "Verdict reached",
        (
            "The judge decided on {n} days of prison.",
            "A court asked for {n} days behind bars.",
            "The sentence is {n} days, the judge said.",
        ),
        "A court in {town} sent {person} to prison for {n} days.",
    ),
    _Story(
        "Children saved",
        (
            "When the boat sank, {n} children were pulled out of the river.",
            "The boat went down, but {n} children were saved.",
            "Thanks to a brave swimmer, {n} children survived.",
        ),
        "{person} saved {n} children from the river at {town}.",
    ),
    _Story(
        "Doors open",
        (
            "The firm opened a hall for {n} guests.",
            "A hall with room for {n} guests opened its doors.",
            "The new hall of the firm seats {n} guests.",
        ),
        "{org} opened a hall for {n} guests in {town}.",
    ),
    _Story(
        "March through the streets",
        (
            "The streets saw {n} people march.",
            "A march of {n} people stopped all traffic.",
            "Banners were carried by {n} people on the march.",
        ),
        "{n} people marched through {town} behind {person}.",
    ),
    _Story(
        "Water rises",
        (
            "The flood drove {n} people from their beds.",
            "After the flood {n} people have no home.",
            "The water took the homes of {n} people.",
        ),
        "A flood left {n} people in {town} without a home.",
    ),
    _Story(
        "A gift",
        (
            "The library received {n} books.",
            "Shelves for {n} books are needed in the library.",
            "A gift of {n} books arrived at the library.",
        ),
        "{person} gave {n} books to the library of {town}.",
    ),
)
_LEADS = (
    "{person} of {org} was in {town} that day.",
    "Reporters met {person} of {org} in {town}.",
    "In {town}, {person} spoke for {org}.",
    "The news reached {person} of {org} in {town}.",
)
_QUOTES = (
    '"We did not expect this," said one of those who were there.',
    '"It will take time," an official said.',
    "The mayor declined to comment.",
    "A spokesman promised to answer questions later.",
    "More details are expected in the coming days.",
    "It was all that people talked about the next morning.",
)


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example with one story an article; the summary tells them in order.

    An article begins with the person and the town, unless it follows up on the article before.
    """
    world = World(rng, split)
    lead: dict[str, str] = {}
    articles: list[Passage] = []
    summary: list[str] = []
    for story in rng.sample(_STORIES, level.count(rng, *ARTICLES)):
        follows = bool(lead) and rng.random() < level.manner.cut
        lead = lead if follows else _lead(rng, world)
        number = str(rng.randrange(11, 1000))
        articles.append(_article(rng, story, number, None if follows else lead))
        summary.append(story.summary.format(n=number, **lead))
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


def _article(rng: Random, story: _Story, number: str, lead: dict[str, str] | None) -> Passage:
    opening = rng.choice(_LEADS).format(**lead) if lead else ""
    body = [rng.choice(story.reports).format(n=number), rng.choice(_QUOTES)]
    length = sum(len(sentence.split()) for sentence in (opening, *body))
    wanted = rng.randrange(*WORDS)
    while length < wanted:
        body.append(aside(rng))
        length += len(body[-1].split())
    rng.shuffle(body)
    title = story.headline if lead else f"Continued: {story.headline}"
    return Passage(title, " ".join([opening, *body] if lead else body), continues=not lead)
