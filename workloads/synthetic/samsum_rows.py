"""Chats and summaries of who does what, in the manner of SAMSum's few-shot rows.

The examples in a context agree on how a summary is worded, so a model must have read them to know
how the last chat is to be summed up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from picbench.workloads.synthetic import names
from picbench.workloads.synthetic.example import Example, Exchange, Level
from picbench.workloads.synthetic.names import Split
from picbench.workloads.yaml_data import read_data

#: Fewest and most examples of a context.
EXAMPLES = (5, 16)

_PLAN, _TASK, _EVENT = range(3)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a stretch of chat came to: the sort of sentence it needs, who, and what."""

    sort: int
    who: str
    other: str
    what: str

    def told(self, style: int) -> str:
        wording: str = _said("styles")[style][self.sort]
        return wording.format(a=self.who, b=self.other, x=self.what)


_Line = tuple[str, str]
_Stretch = tuple[list[_Line], _Outcome]


def make(rng: Random, split: Split, index: int, level: Level) -> Example:
    """Make an example whose chats are all summed up in one style."""
    style = rng.randrange(len(_said("styles")))
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
        name = rng.choice(names.words("women") + names.words("men"))
        if names.split_of(name) == split and name not in pair:
            pair.append(name)
    return pair


def _draw(rng: Random, field: str) -> str:
    said: str = rng.choice(_said(field))
    return said


def _said(field: str) -> Any:
    return read_data("synthetic", "samsum")[field]


def _plan(rng: Random, a: str, b: str) -> _Stretch:
    """They agree to do something; the day may change on the way."""
    activity, place, day = (_draw(rng, field) for field in ("activity", "place", "day"))
    lines = [(a, _draw(rng, "asks").format(x=f"{activity} {place} {day}"))]
    if rng.random() < 0.4:
        day = _draw(rng, "day")
        lines += [(b, f"Could we do it {day} instead?"), (a, _draw(rng, "yes"))]
    else:
        lines.append((b, _draw(rng, "yes")))
    return lines, _Outcome(_PLAN, a, b, f"{activity} {place} {day}")


def _task(rng: Random, a: str, b: str) -> _Stretch:
    """One of them takes on a task: the other one, or after a refusal the one who asked."""
    task = _draw(rng, "task")
    lines = [(a, _draw(rng, "pleas").format(x=task))]
    if rng.random() < 0.4:
        lines += [(b, _draw(rng, "no")), (a, "Then I will do it myself.")]
        return lines, _Outcome(_TASK, a, b, task)
    lines.append((b, _draw(rng, "offers")))
    return lines, _Outcome(_TASK, b, a, task)


def _event(rng: Random, a: str, b: str) -> _Stretch:
    """One of them has news."""
    event = _draw(rng, "event")
    lines = [(a, _draw(rng, "news").format(x=event)), (b, _draw(rng, "wow"))]
    return lines, _Outcome(_EVENT, a, b, event)


_MOVES: tuple[Callable[[Random, str, str], _Stretch], ...] = (_plan, _task, _event)
