"""Sentences that carry no fact of the world: the hay around the needles.

`{s}` is the subject of a passage, the other fields are drawn from the word lists.
"""

from functools import cache
from random import Random
from string import Formatter
from types import MappingProxyType

from picbench.workloads.synthetic.world.entities import ORGANISATION, PERSON, WORK, Form
from picbench.workloads.synthetic.world.invented_names import phrases, words

_WORDS = MappingProxyType(
    {
        "adj": words(
            "bitter bright broad careful cheap clumsy crowded curious damp dark dull dusty famous "
            "fragile gloomy grand grey heavy humble large late lively local long loud lucky "
            "modern modest narrow neat noisy patient plain proud rare rough rusty short shy "
            "simple slow small solid steep strange sturdy tall thin tidy tired warm wide wild "
            "young"
        ),
        "thing": words(
            "archive attic barn basket bell bench boat bottle box cabinet cart chair clock coat "
            "corridor courtyard cup curtain desk diary door drum engine fence ferry fountain "
            "gallery garage gate hat kettle kitchen ladder lamp ledger library map market mill "
            "notebook oven photograph piano plate postcard quarry roof rope saddle shed shelf "
            "shop stove table tent ticket tram trunk tunnel umbrella wagon wall wheel workshop"
        ),
        "who": words(
            "admirers apprentices builders children clerks collectors cousins critics dealers "
            "engineers farmers fishermen guests historians hikers journalists lodgers merchants "
            "musicians neighbours officials pensioners porters pupils readers scholars servants "
            "shopkeepers soldiers students tenants tourists travellers villagers visitors "
            "volunteers widows workers"
        ),
        "when": phrases(
            "in spring|in summer|in autumn|in winter|after the war|before dawn|on Sundays|"
            "at night|every second year|during the holidays|in those days|for a long time|"
            "once a month|most evenings|after the flood|in bad weather|without warning|long ago|"
            "these days|at the end of the season"
        ),
        "verb": words(
            "admired avoided borrowed cleaned collected copied counted defended described "
            "discussed doubted examined feared forgot guarded hated ignored inspected loved "
            "measured mentioned missed painted praised preferred remembered repaired sketched "
            "studied trusted visited"
        ),
    }
)

_ANYTHING = (
    "The {who} {verb} the {adj} {thing} {when}.",
    "No one {verb} the {thing} more than the {who} did.",
    "A {adj} {thing} stood next to a {adj} {thing} {when}.",
    "Some of the {who} still talk about a {adj} {thing}.",
    "The {adj} {thing} was sold to {who} {when}.",
    "It is said that {who} {verb} every {thing} they saw.",
    "Much of this is known only from the letters of {who}.",
    "A {adj} note about the {thing} was lost {when}.",
    "The {who} were {adj}, the {thing} was {adj}, and nothing more was heard.",
    "There was this {thing}, {adj} and {adj}, which the {who} {verb}.",
    "Opinions about the {thing} differ among {who} and {who}.",
    "One {adj} {thing} is still on display {when}.",
)

_PERSON = (
    "{s} kept a {adj} {thing} and {verb} it {when}.",
    "{s} was {adj} towards {who} but {adj} towards {who}.",
    "{s} {verb} every old {thing}, as many {who} did {when}.",
    "Among {who}, {s} had a reputation for being {adj} and {adj}.",
    "{s} never owned a {adj} {thing}, which surprised the {who}.",
    "The {who} {verb} {s} for a {adj} sense of humour.",
)
_PLACE = (
    "{s} is known for a {adj} {thing} that {who} visit {when}.",
    "{s} has a {adj} {thing} and a {adj} {thing}.",
    "The {who} of {s} celebrate a {adj} festival {when}.",
    "{s} attracts {who} and {who} {when}.",
    "A {adj} {thing} in the middle of {s} was restored by {who}.",
    "{s} was described as {adj} by {who} who came {when}.",
)
_WORK = (
    "{s} was called {adj} and {adj} by {who}.",
    "{s} opens with a {adj} {thing} and ends with a {adj} one.",
    "Several {who} {verb} {s} {when}.",
    "{s} tells of {who} who lose a {adj} {thing}.",
    "A {adj} {thing} plays a large part in {s}.",
    "{s} was forgotten {when}, until {who} {verb} it again.",
)
_ORGANISATION = (
    "{s} employs {adj} {who} and a few {who}.",
    "{s} once lost a {adj} {thing} {when}.",
    "The {who} at {s} {verb} a {adj} {thing} {when}.",
    "{s} is regarded as {adj} by {who}.",
    "{s} publishes a {adj} report about its {thing} {when}.",
    "A {adj} {thing} hangs in the entrance of {s}.",
)

_ABOUT: MappingProxyType[Form, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(PERSON, _PERSON),
        **dict.fromkeys(WORK, _WORK),
        **dict.fromkeys(ORGANISATION, _ORGANISATION),
        "town": _PLACE,
        "country": _PLACE,
    }
)


def aside(rng: Random) -> str:
    """A sentence without a subject of the world."""
    return _fill(rng, rng.choice(_ANYTHING))


def remark(rng: Random, form: Form) -> str:
    """A sentence about a subject of this form, with `{s}` left in for its name."""
    return _fill(rng, rng.choice(_ABOUT[form]))


def _fill(rng: Random, template: str) -> str:
    text, fields = _compiled(template)
    return text % tuple(rng.choice(_WORDS[field]) for field in fields)


@cache
def _compiled(template: str) -> tuple[str, tuple[str, ...]]:
    """The template with `%s` for the fields that are drawn, and the names of these."""
    parsed = [(literal, field or "") for literal, field, _, _ in Formatter().parse(template)]
    drawn = tuple(field for _, field in parsed if field in _WORDS)
    kept = (literal + _placeholder(field) for literal, field in parsed)
    return "".join(kept), drawn


def _placeholder(field: str) -> str:
    if field in _WORDS:
        return "%s"
    return f"{{{field}}}" if field else ""
