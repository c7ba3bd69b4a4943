"""The texts of anchors: the built-in passage, a file, or chunks of a run's own traffic."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from picbench.engines.planning.policy import Anchor
from picbench.errors import ConfigError

PASSAGE = "passage"

#: Tokens of an anchor's text.
Tokens = Sequence[int]


class Anchors:
    """What users may say of anchors."""

    def parse(self, text: str) -> Anchor | None:
        """The anchor that `text` names; None if it is none. Files are not read yet."""
        if text in ("off", "head"):
            return Anchor(head=text == "head")
        # A mistyped word is no file.
        known = text == PASSAGE or sampled(text) or {".", "/"} & {*text}
        return Anchor(head=True, text=text) if known else None

    def __str__(self) -> str:
        return f"off|head|{PASSAGE}|sample-N|./FILE"


def sampled(name: str) -> int:
    """How many chunks of a run's own traffic an anchor is made of: N of ``sample-N``, else 0."""
    found = re.fullmatch(r"sample-([1-9]\d{0,3})", name)
    return int(found[1]) if found else 0


def read_text(name: str) -> str:
    """The text of an anchor. Raises ConfigError for a file that cannot be read or has no text."""
    if sampled(name):
        raise ConfigError(f"anchor={name}: only picbench run knows its traffic", hint="use ./FILE")
    path = Path(__file__).with_name("passage.txt") if name == PASSAGE else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"anchor={name} cannot be read: {reason}", hint=f"use {Anchors()}"
        ) from error
    if not text.strip():
        raise ConfigError(f"anchor={name} is empty", hint="give a file with some text")
    return text


def find_tokens(
    known: Mapping[str, Tokens], named: str, encode: Callable[[str], Tokens] | None
) -> dict[str, Tokens]:
    """Tokens of anchors by name: `known` ones, the built-in passage, and the one that is `named`.

    `encode` is the model's tokenizer. Without one, raises ConfigError if `named` ("" is none) is
    not known.
    """
    found = dict(known)
    for name in {named, PASSAGE} - found.keys() - {""}:
        if encode is not None:
            found[name] = tuple(encode(read_text(name)))
        elif name == named:
            raise ConfigError(
                f"anchor={name}: the model has no tokenizer", hint="give its ids in `anchors`"
            )
    return found


def stand_ins(named: str) -> dict[str, Tokens]:
    """As many tokens as an anchor has, about, where no tokenizer is at hand: four for three words.

    Raises ConfigError as `read_text`.
    """
    return {named: (0,) * -(-len(read_text(named).split()) * 4 // 3)} if named else {}
