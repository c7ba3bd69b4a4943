"""Word F1 and exact match of a reply and a reference.

F1 is as LongBench computes it (metrics.py, qa_f1_score), and words are normalised alike in both.
"""

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(prediction: str, reference: str) -> float:
    """Return the F1 of the two texts' words as multisets, from 0 to 1."""
    predicted, expected = words(prediction), words(reference)
    common = (Counter(predicted) & Counter(expected)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if the two texts have the same words in the same order, else 0."""
    return float(words(prediction) == words(reference))


def words(text: str) -> list[str]:
    """Lower-case, drop ASCII punctuation, then the articles a, an, the; split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
