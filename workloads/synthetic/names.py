"""Invented names, built from shared syllables and split by hash into train, validation and test.

Two different names often share a word, and two words often share a syllable, so that a model
cannot tell entities apart by one token. The CRC-32 of a name decides its split: no entity of
the test rows was seen in training.
"""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Literal, get_args
from zlib import crc32

from picbench.workloads.yaml_data import read_data

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@cache
def words(kind: str) -> tuple[str, ...]:
    """All words that names of a kind are made of: women, men, families, towns, lands, rivers.

    Languages are vocabulary, like trades and coins: all splits share those of the train split.
    """
    parts = read_data("synthetic", "words")["names"][kind]
    found = tuple(head + tail for head in parts["heads"] for tail in parts["tails"])
    return tuple(w for w in found if split_of(w) == "train") if kind == "languages" else found


def split_of(name: str) -> Split:
    """The split of a name: 80 % train, 10 % validation, 10 % test."""
    bucket = crc32(name.encode()) % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def person_name(rng: Random, form: str, like: str | None = None) -> str:
    """A given name that fits `form` ("woman" or "man") and a family name, that of `like` if any."""
    given = rng.choice(words("women" if form == "woman" else "men"))
    family = like.split()[-1] if like else rng.choice(words("families"))
    return f"{given} {family}"


def organisation_name(rng: Random, form: str, like: str | None = None) -> str:
    """A family name, that of `like` if any, and what the organisation is ("university", ...)."""
    family = like.split()[0] if like else rng.choice(words("families"))
    return rng.choice(_forms(form)).format(family)


def town_name(rng: Random) -> str:
    """A town: one invented word, sometimes with a common word before or after it."""
    return rng.choice(_forms("town")).format(rng.choice(words("towns")))


def country_name(rng: Random) -> str:
    """A country: one invented word, sometimes with a compass direction."""
    return rng.choice(_forms("country")).format(rng.choice(words("lands")))


def title(rng: Random) -> str:
    """The title of a film, a novel or an opera."""
    form, said = rng.choice(_forms("title")), read_data("synthetic", "words")["title"]
    adjective, noun = rng.choice(said["adjectives"]), rng.choice(said["nouns"])
    return form.format(a=adjective, n=noun, t=rng.choice(words("towns")))


def _forms(form: str) -> Sequence[str]:
    forms: Sequence[str] = read_data("synthetic", "words")["forms"][form]
    return forms
