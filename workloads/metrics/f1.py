"""Word F1, exact match and string match of a reply and a reference.

F1 is as LongBench computes it (metrics.py, qa_f1_score), and words are normalised alike in both.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from unicodedata import category, normalize

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: The only marks of format, which are not shown, that tell words apart (Persian, Hindi).
_JOINERS = "\u200c\u200d"


def f1(prediction: str, reference: str) -> float:
    """Return the F1 of the two texts' words as multisets, from 0 to 1."""
    return overlap(words(prediction), words(reference))


def overlap(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return the F1 of two multisets of words, from 0 to 1."""
    common = (Counter(predicted) & Counter(expected)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if the two texts have the same words, at least one, in the same order, else 0."""
    return float(not wordless(reference) and words(prediction) == words(reference))


def string_match(prediction: str, reference: str) -> float:
    """Return the share of the reference's parts between commas that are in the reply (RULER)."""
    wanted = [part.strip() for part in reference.lower().split(",") if part.strip()]
    return sum(part in prediction.lower() for part in wanted) / max(1, len(wanted))


def wordless(text: str) -> bool:
    """Whether there is nothing in a text but articles, punctuation and blanks."""
    return all(category(letter)[0] in "CPZ" for word in words(text) for letter in word)


def comparable(text: str) -> str:
    """The text in Unicode's composed form (NFC), as it looks: without marks that are not shown."""
    shown = (letter for letter in text if category(letter) != "Cf" or letter in _JOINERS)
    return normalize("NFC", "".join(shown))


def words(text: str) -> list[str]:
    """Lower-case, drop ASCII punctuation, then the articles a, an, the; split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
