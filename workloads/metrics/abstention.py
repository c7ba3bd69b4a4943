"""Replies that say that the passages do not tell: an abstention, which word F1 alone hides.

It is the typical failure of a model that lost sight of a passage, and another one than a wrong
answer. The phrases are those with which instruction-tuned models decline a question over passages,
in the languages of ``data/abstentions.yaml``.
"""

import re
from functools import cache
from itertools import chain

from picbench.workloads.yaml_data import read_data


def abstains(reply: str) -> bool:
    """Whether a reply declines the question: its first line says that nothing is known."""
    line = reply.strip().lower().replace("\u2019", "'").partition("\n")[0]
    return _abstained().search(line) is not None


@cache
def _abstained() -> re.Pattern[str]:
    found = dict(read_data("metrics", "abstentions"))
    words = found.pop("words")
    capitals = re.compile("|".join(words))
    return re.compile(capitals.sub(lambda m: words[m[0]], "|".join(chain(*found.values()))))
