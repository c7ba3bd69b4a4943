"""Invented names, built from shared syllables and split by hash into train, validation and test.

Two different names often share a word, and two words often share a syllable, so that a model
cannot tell entities apart by one token. The CRC-32 of a name decides its split: no entity of
the test rows was seen in training.
"""

from random import Random
from typing import Literal, get_args
from zlib import crc32

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """The phrases of a text, which vertical bars separate."""
    return tuple(text.split("|"))


def _words(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


_STEMS = "Bar Cal Dor Elm Fen Gar Hal Isk Jor Kel Lor Mar Nor Osk Pel Quin Ras Sel Tor Ulm Var Wes"
WOMEN = _words("Al Bri Cora Dani El Fio Ma Ne Os Re Sa Ti Ve Zo", "ra lia na mira beth sa ris")
MEN = _words("Al Bra Cor Dan Ed Fin Ma No Os Ro Sa Tor Vic Za", "ric den mund vin bert ko lan")
FAMILIES = _words(_STEMS, "ek ovic den man sen well ley thorpe ano ides ert ick onen ova quist ard")
TOWNS = _words(_STEMS, "burg mere stad ford holm wick minster port dale ness vale hurst")
LANDS = _words(_STEMS, "ia land avia mark onia istan")
RIVERS = _words(_STEMS, "a ent une isse")

_TOWN_FORMS = ("{}", "{}", "Port {}", "New {}", "Upper {}", "Lower {}", "Saint {}", "{} Falls")
_COUNTRY_FORMS = ("{}", "{}", "{}", "North {}", "South {}", "East {}", "West {}")
_ADJECTIVES = words(
    "Silver Broken Hidden Quiet Crimson Distant Golden Hollow Burning Frozen Paper Velvet Wooden "
    "Endless Scarlet Empty Gentle Iron Amber Lonely Northern Painted Restless Secret Sleeping "
    "Stolen Twisted Wandering White Winter"
)
_NOUNS = words(
    "Lantern Harbour Orchard Mirror Garden Letter Tower Shadow Compass Bridge Crown Feather "
    "Anchor Window Island Kingdom Lighthouse Meadow Mountain Ocean Palace River Sparrow Staircase "
    "Stranger Teacher Thunder Violin Voyage Willow Whisper Carnival Candle Forest Fortune Journey "
    "Machine"
)
_TITLE_FORMS = ("The {a} {n}", "The {a} {n}", "{a} {n}", "The {n} of {t}", "A {n} in {t}")
_ORG_FORMS = {
    "company": ("{} Works", "{} Motors", "{} Bank", "{} Shipping", "{} Foods", "{} Glass"),
    "university": ("{} College", "{} University", "{} Academy"),
    "studio": ("{} Pictures", "{} Press", "{} Media", "{} House"),
}


def split_of(name: str) -> Split:
    """The split of a name: 80 % train, 10 % validation, 10 % test."""
    bucket = crc32(name.encode()) % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


#: Languages are vocabulary, like trades and coins: all splits share those of the train split.
LANGUAGES = tuple(word for word in _words(_STEMS, "ish ese ic") if split_of(word) == "train")


def person_name(rng: Random, form: str, like: str | None = None) -> str:
    """A given name that fits `form` ("woman" or "man") and a family name, that of `like` if any."""
    given = rng.choice(WOMEN if form == "woman" else MEN)
    family = like.split()[-1] if like else rng.choice(FAMILIES)
    return f"{given} {family}"


def organisation_name(rng: Random, form: str, like: str | None = None) -> str:
    """A family name, that of `like` if any, and what the organisation is ("university", ...)."""
    family = like.split()[0] if like else rng.choice(FAMILIES)
    return rng.choice(_ORG_FORMS[form]).format(family)


def town_name(rng: Random) -> str:
    """A town: one invented word, sometimes with a common word before or after it."""
    return rng.choice(_TOWN_FORMS).format(rng.choice(TOWNS))


def country_name(rng: Random) -> str:
    """A country: one invented word, sometimes with a compass direction."""
    return rng.choice(_COUNTRY_FORMS).format(rng.choice(LANDS))


def title(rng: Random) -> str:
    """The title of a film, a novel or an opera."""
    form = rng.choice(_TITLE_FORMS)
    return form.format(a=rng.choice(_ADJECTIVES), n=rng.choice(_NOUNS), t=rng.choice(TOWNS))
