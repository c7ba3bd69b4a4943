"""Cut a context into chunks.

Every function that cuts returns strings whose concatenation is the context.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from picbench.errors import DataError

#: Counts the tokens of each text.
Counter = Callable[[Sequence[str]], Sequence[int]]

#: EPIC's chunk length in tokens for text without marks.
CHUNK_TOKENS = 512

_PASSAGE = re.compile(r"^Passage ([0-9]{1,9}):[ \t]*\r?\n", re.MULTILINE)
_DIALOGUE = re.compile(r"^(Dialogue|Summary):", re.MULTILINE)
_ARTICLE = re.compile(r"\|{5}")
#: What closes a quotation or brackets, also in Chinese and Japanese.
_CLOSING = r"[\"'\u201d\u2019)\]\u300d\u300f\uff09\u3011\u300b\u3009\u3015\uff3d\uff5d]*"
#: After a full stop and a space; after one of Chinese, Japanese, Ethiopic, Khmer or Burmese, or one
#: before a Chinese or Japanese letter; at a space between Thai or Lao letters; at a blank line.
_SENTENCE_END = re.compile(
    rf"[.!?\u0964\u0965\u061f\u06d4\u0589]{_CLOSING}\s+"
    rf"|(?:[\u3002\uff01\uff1f\uff61\u1362\u17d4\u104b]+|\uff0e(?!\d)"
    rf"|[.!?](?={_CLOSING}[\u3041-\u30ff\u3400-\u9fff])){_CLOSING}\s*"
    r"|(?<=[\u0e00-\u0eff])\s+(?=[\u0e00-\u0eff])|\n\s*\n"
)
_TITLE = re.compile(r".*\S")
_SECTION = re.compile(r"^Section \d+:", re.MULTILINE)
_WORD_END = re.compile(r"\s+|[\uff0c\u3001\uff1b\uff1a]")


class _Atom(NamedTuple):
    """Text that is not cut further: a sentence, or a word of one too long for a chunk."""

    text: str
    tokens: int
    ends_sentence: bool


def passages(context: str) -> list[str]:
    """Cut before the lines ``Passage 1:``, ``Passage 2:`` ..., which stay with their passages.

    Other lines of this form are text that a passage quotes. Raises DataError where two lines could
    be the beginning of one passage.
    """
    marks = list(_PASSAGE.finditer(context))
    first = _in_order(marks, 1, 1)
    if first and first[::-1] != _in_order(marks[::-1], len(first), -1):
        raise DataError(
            "a passage quotes the line that the next one begins with: two ways to cut the context",
            hint="`columns=passages=COLUMN` takes passages from a list",
        )
    return _cut_at(context, first)


def dialogues(context: str) -> list[str]:
    """Cut before every line that starts with ``Dialogue:`` (an example) after a ``Summary:``."""
    marks = [(match[1], match.start()) for match in _DIALOGUE.finditer(context)]
    pairs = pairwise([("Summary", 0), *marks])
    return _cut_at(context, [at for (last, _), (mark, at) in pairs if last > mark])


def articles(context: str) -> list[str]:
    """Cut before every passage, or where there is none at Multi-News' own ``|||||``."""
    found = passages(context)
    marks = () if len(found) > 1 else _ARTICLE.finditer(context)
    return _cut_at(context, (mark.start() for mark in marks)) if marks else found


def content(passage: str) -> str:
    """A passage without the ``Passage i:`` line."""
    head = _PASSAGE.match(passage)
    return passage[head.end() :] if head else passage


def title(passage: str) -> str | None:
    """The first line of a passage's content; None where it is blank."""
    found = _TITLE.match(content(passage))
    return found[0] if found else None


def preceding(documents: Sequence[Hashable], places: Sequence[int] = ()) -> list[list[int]]:
    """For each passage, those before it in its document, in order.

    `documents` names the document of each, `places` its place there (default: in their order).
    """
    at = places or range(len(documents))
    same: dict[Hashable, list[int]] = {}
    for number in sorted(range(len(at)), key=at.__getitem__):
        same.setdefault(documents[number], []).append(number)
    placed = zip(documents, at, strict=True)
    return [[n for n in same[document] if at[n] < place] for document, place in placed]


def before(
    chunks: Sequence[str], documents: Sequence[Hashable], places: Sequence[int] = ()
) -> list[str]:
    """For each chunk, those before it in its document, each content once and never its own."""
    found: list[str] = []
    for chunk, earlier in zip(chunks, preceding(documents, places), strict=True):
        once: dict[str, str] = {}
        for number in earlier:
            once.setdefault(content(chunks[number]).strip(), chunks[number])
        once.pop(content(chunk).strip(), None)
        found.append("".join(once.values()))
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


def _in_order(marks: Iterable[re.Match[str]], number: int, step: int) -> list[int]:
    """Where the first mark called `number` is, the first called `number + step` after it, ..."""
    found: list[int] = []
    for mark in marks:
        if int(mark[1]) == number + step * len(found):
            found.append(mark.start())
    return found


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
