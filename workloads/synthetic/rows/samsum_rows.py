"""Chats and summaries of who does what, in the manner of SAMSum's few-shot rows.

The examples in a context agree on how a summary is worded, so a model must have read them to know
how the last chat is to be summed up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.world import invented_names
from picbench.workloads.synthetic.world.invented_names import Split, phrases

#: Fewest and most examples of a context.
EXAMPLES = (5, 16)

_LISTS = MappingProxyType(
    {
        "day": phrases(
            "on Monday|on Tuesday|on Wednesday|on Thursday|on Friday|on Saturday|on Sunday|"
            "tonight|tomorrow|next week|after work|at noon"
        ),
        "place": phrases(
            "at the lake|at the station|at the old mill|in the park|at the market|at the library|"
            "by the harbour|at the museum|in the garden|at the pool|at the corner shop|in the barn"
        ),
        "activity": phrases(
            "play chess|have lunch|go running|see a film|drink tea|practise the song|ride bikes|"
            "pick berries|paint the fence|study for the exam|go swimming|feed the ducks"
        ),
        "task": phrases(
            "bring a cake|buy the tickets|fix the tent|call the doctor|book a table|walk the dog|"
            "return the books|water the plants|pick up the keys|print the map|wash the car|"
            "order the flowers|charge the camera|pay the bill|carry the chairs|feed the cat"
        ),
        "event": phrases(
            "lost a wallet|found a kitten|broke a window|sold the old bike|bought a telescope|"
            "won a prize|passed the test|missed the train|got a new job|burned the soup|"
            "adopted a parrot|forgot the password"
        ),
        "chat": phrases(
            "How are you?|Long time no see!|It is so cold today.|I slept badly.|Ha ha, true.|"
            "My phone is almost dead.|I miss the summer.|You are funny.|Anyway.|What a week!|"
            "The traffic was terrible.|I am so hungry.|Let me think.|Good to hear from you.|"
            "Oh well."
        ),
        "yes": phrases("Sure!|Great idea.|Why not?|Fine with me.|I would love to.|OK!"),
        "no": phrases("No, sorry.|I have no time.|Not me, sorry.|I really cannot."),
        "wow": phrases("Really?|Oh no!|Wow.|Tell me more!|I cannot believe it.|Seriously?"),
    }
)
_ASKS = ("Shall we {x}?", "Do you want to {x}?", "I would like to {x}. Are you in?", "Let's {x}!")
_PLEAS = ("Who can {x}?", "Somebody has to {x}.", "We still need to {x}.", "Could you {x}?")
_OFFERS = ("I can do that.", "I'll do it.", "Leave it to me.", "OK, I'll take care of it.")
_NEWS = ("Guess what, I {x}.", "You know what? I {x}.", "Yesterday I {x}.", "I {x} today.")

#: How plans, tasks and news are worded, style by style.
_STYLES = (
    ("{a} and {b} will {x}.", "{a} will {x}.", "{a} {x}."),
    ("{a} and {b} are going to {x}.", "{a} is going to {x}.", "It was {a} who {x}."),
    ("The plan of {a} and {b} is to {x}.", "The one to {x} is {a}.", "{b} hears that {a} {x}."),
)
_PLAN, _TASK, _EVENT = range(3)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a stretch of chat came to: the sort of sentence it needs, who, and what."""

    sort: int
    who: str
    other: str
    what: str

    def told(self, style: int) -> str:
        return _STYLES[style][self.sort].format(a=self.who, b=self.other, x=self.what)


_Line = tuple[str, str]
_Stretch = tuple[list[_Line], _Outcome]


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example whose chats are all summed up in one style."""
    style = rng.randrange(len(_STYLES))
    shown = [_chat(rng, split, style) for _ in range(level.count(rng, *EXAMPLES))]
    asked, *more = (_exchange(*_chat(rng, split, style)) for _ in range(1 + level.more))
    context = "\n".join(f"Dialogue: {chat}\nSummary: {summary}" for chat, summary in shown)
    return Example(context, asked, asked.reply, f"style-{style}", more=tuple(more))


def _exchange(chat: str, summary: str) -> Exchange:
    return Exchange(f"Dialogue: {chat}\nSummary:", summary)


def _chat(rng: Random, split: Split, style: int) -> tuple[str, str]:
    pair = _pair(rng, split)
    lines: list[_Line] = []
    outcomes: list[_Outcome] = []
    for _ in range(rng.randint(2, 3)):
        if rng.random() < 0.5:
            lines.append((rng.choice(pair), _draw(rng, "chat")))
        said, outcome = rng.choice(_MOVES)(rng, *rng.sample(pair, 2))
        lines += said
        outcomes.append(outcome)
    chat = "\n".join(f"{who}: {what}" for who, what in lines)
    return chat, " ".join(outcome.told(style) for outcome in outcomes)


def _pair(rng: Random, split: Split) -> list[str]:
    pair: list[str] = []
    while len(pair) < 2:
        name = rng.choice(invented_names.WOMEN + invented_names.MEN)
        if invented_names.split_of(name) == split and name not in pair:
            pair.append(name)
    return pair


def _draw(rng: Random, field: str) -> str:
    return rng.choice(_LISTS[field])


def _plan(rng: Random, a: str, b: str) -> _Stretch:
    """They agree to do something; the day may change on the way."""
    activity, place, day = (_draw(rng, field) for field in ("activity", "place", "day"))
    lines = [(a, rng.choice(_ASKS).format(x=f"{activity} {place} {day}"))]
    if rng.random() < 0.4:
        day = _draw(rng, "day")
        lines += [(b, f"Could we do it {day} instead?"), (a, _draw(rng, "yes"))]
    else:
        lines.append((b, _draw(rng, "yes")))
    return lines, _Outcome(_PLAN, a, b, f"{activity} {place} {day}")


def _task(rng: Random, a: str, b: str) -> _Stretch:
    """One of them takes on a task: the other one, or after a refusal the one who asked."""
    task = _draw(rng, "task")
    lines = [(a, rng.choice(_PLEAS).format(x=task))]
    if rng.random() < 0.4:
        lines += [(b, _draw(rng, "no")), (a, "Then I will do it myself.")]
        return lines, _Outcome(_TASK, a, b, task)
    lines.append((b, rng.choice(_OFFERS)))
    return lines, _Outcome(_TASK, b, a, task)


def _event(rng: Random, a: str, b: str) -> _Stretch:
    """One of them has news."""
    event = _draw(rng, "event")
    lines = [(a, rng.choice(_NEWS).format(x=event)), (b, _draw(rng, "wow"))]
    return lines, _Outcome(_EVENT, a, b, event)


_MOVES: tuple[Callable[[Random, str, str], _Stretch], ...] = (_plan, _task, _event)
