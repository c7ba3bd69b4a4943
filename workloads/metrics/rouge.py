"""Rouge-L as the package `rouge` 1.0.1 computes it, which LongBench scores summaries with.

Its summary-level rouge-l cuts both texts at full stops, aligns every reference sentence with
every predicted one, and counts *distinct* words: those on any alignment, over those in the
reference (recall) and in the prediction (precision).
"""

from collections.abc import Sequence


def rouge_l(prediction: str, reference: str) -> float:
    """Return the F-measure, from 0 to 1; 0 where either text has no sentence.

    Differs from the package in one place: there a pair of sentences of about a thousand words
    exceeds Python's recursion limit, which LongBench turns into 0.
    """
    predicted, expected = _sentences(prediction), _sentences(reference)
    if not predicted or not expected:
        return 0.0
    shared = {
        word for ref in expected for hyp in predicted for word in common_subsequence(ref, hyp)
    }
    precision = len(shared) / len({word for sentence in predicted for word in sentence})
    recall = len(shared) / len({word for sentence in expected for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return a longest common subsequence; among several, the one that `rouge` picks."""
    table = _lengths(left, right)
    i, j = len(left), len(right)
    found: list[str] = []
    while i and j:
        if left[i - 1] == right[j - 1]:
            i, j = i - 1, j - 1
            found.append(left[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _lengths(left: Sequence[str], right: Sequence[str]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of all pairs of prefixes."""
    table = [[0] * (len(right) + 1)]
    for word in left:
        above, row = table[-1], [0]
        for j, other in enumerate(right):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    return table


def _sentences(text: str) -> list[list[str]]:
    # White space alone counts as a sentence of one empty word, as in the package.
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]
