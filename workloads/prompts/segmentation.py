"""Cut a context into chunks.

Every function that cuts returns strings whose concatenation is the context.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

#: Counts the tokens of each text.
Counter = Callable[[Sequence[str]], Sequence[int]]

#: EPIC's chunk length in tokens for text without marks.
CHUNK_TOKENS = 512

_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_DIALOGUE = re.compile(r"^Dialogue:", re.MULTILINE)
_ARTICLE = re.compile(r"^Passage \d+:\n|\|{5}", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*\s+|\n\s*\n")
_TITLE = re.compile(r"Passage \d+:\n(.*\S)")
_SECTION = re.compile(r"^Section \d+:", re.MULTILINE)
_WORD_END = re.compile(r"\s+")


class _Atom(NamedTuple):
    """Text that is not cut further: a sentence, or a word of one too long for a chunk."""

    text: str
    tokens: int
    ends_sentence: bool


def passages(context: str) -> list[str]:
    """Cut before every ``Passage i:`` line, which stays with its passage."""
    return _cut_before(context, _PASSAGE)


def dialogues(context: str) -> list[str]:
    """Cut before every line that starts with ``Dialogue:`` (an example with its summary)."""
    return _cut_before(context, _DIALOGUE)


def articles(context: str) -> list[str]:
    """Cut before every article: a ``Passage i:`` line, or Multi-News' own ``|||||``."""
    return _cut_before(context, _ARTICLE)


def title(passage: str) -> str | None:
    """The line after a ``Passage i:`` line; None where there is none."""
    found = _TITLE.match(passage)
    return found[1] if found else None


def before(chunks: Sequence[str], documents: Sequence[Hashable]) -> list[str]:
    """For each chunk, the chunks before it that are from the same document, concatenated."""
    so_far: dict[Hashable, str] = {}
    found: list[str] = []
    for chunk, document in zip(chunks, documents, strict=True):
        found.append(so_far.get(document, ""))
        so_far[document] = found[-1] + chunk
    return found


def before_in_sections(chunks: Sequence[str]) -> list[str]:
    """For each chunk, the text from the ``Section i:`` line above it; all of it without such lines.

    A chunk in which a section begins belongs to the section of its first character.
    """
    text = "".join(chunks)
    heads = [0, *(match.start() for match in _SECTION.finditer(text))]
    starts = accumulate(map(len, chunks[:-1]), initial=0)
    return [text[heads[bisect_right(heads, start) - 1] : start] for start in starts]


def sentences(text: str) -> list[str]:
    """Cut after every sentence and paragraph; white space stays with the text before it."""
    return _cut_after(text, _SENTENCE_END)


def by_tokens(context: str, count: Counter, size: int = CHUNK_TOKENS) -> list[str]:
    """Cut into chunks of at least `size` tokens that end with a sentence, at most twice as long.

    EPIC's rule (its data preparation). Only where no sentence ends between `size` and
    ``2 * size`` tokens is a chunk cut at the end of a word. Tokens are counted sentence by
    sentence, so a chunk's own count may differ by the merges across sentence ends. The last
    chunk may be short.
    """
    chunks: list[str] = []
    length = 0
    closed = True
    for atom in _atoms(context, count, size):
        if closed or length + atom.tokens > 2 * size:
            chunks.append("")
            length = 0
        chunks[-1] += atom.text
        length += atom.tokens
        closed = length >= size and atom.ends_sentence
    return chunks


def _cut_before(text: str, marker: re.Pattern[str]) -> list[str]:
    return _cut_at(text, (match.start() for match in marker.finditer(text)))


def _cut_after(text: str, marker: re.Pattern[str]) -> list[str]:
    return _cut_at(text, (match.end() for match in marker.finditer(text)))


def _cut_at(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = sorted({0, *cuts, len(text)})
    return [text[start:end] for start, end in pairwise(bounds)]


def _atoms(text: str, count: Counter, size: int) -> Iterator[_Atom]:
    whole = sentences(text)
    for sentence, tokens in zip(whole, count(whole), strict=True):
        if tokens <= size:
            yield _Atom(sentence, tokens, True)
        else:
            yield from _words(sentence, count, size)


def _words(sentence: str, count: Counter, size: int) -> Iterator[_Atom]:
    """Cut an overlong sentence into words, and a word that is still too long into characters."""
    words = _cut_after(sentence, _WORD_END)
    atoms: list[str] = []
    for word, tokens in zip(words, count(words), strict=True):
        atoms.extend([word] if tokens <= size else word)
    last = len(atoms) - 1
    for index, (atom, tokens) in enumerate(zip(atoms, count(atoms), strict=True)):
        yield _Atom(atom, tokens, index == last)
