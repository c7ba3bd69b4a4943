"""Word F1 between a reply and a reference, as LongBench computes it (metrics.py, qa_f1_score)."""

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


def words(text: str) -> list[str]:
    """Lower-case, drop ASCII punctuation, then the articles a, an, the; split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
