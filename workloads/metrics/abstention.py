"""Replies that say that the passages do not tell: an abstention, which word F1 alone hides.

It is the typical failure of a model that lost sight of a passage, and another one than a wrong
answer. The phrases are those with which instruction-tuned models decline a question over passages.
"""

import re

_SOURCE = r"(?:passages?|documents?|texts?|context|articles?|information|sources?)"
_TELL = r"(?:mention|say|state|tell|specif|provid|contain|includ|answer|indicat|giv|reveal|discuss)"
_NOT = r"(?:does not|do not|doesn't|don't|did not|didn't|never)"
_CANNOT = r"(?:cannot|can't|can not|could not|couldn't)"

_ABSTAINED = re.compile(
    "|".join(
        (
            rf"\b{_SOURCE}\b[\w\s,']{{0,40}}\b{_NOT}\b[\w\s]{{0,20}}\b{_TELL}",
            rf"\b(?:is|are|was|were|isn't|aren't)? ?not (?:\w+ )?{_TELL}\w*\b.{{0,20}}\b{_SOURCE}",
            rf"^(?:(?:it|this|that) is )?not (?:explicitly |directly )?{_TELL}\w*\W*$",
            r"^(?:none|unknown|unanswerable|n/?a|not (?:known|available|enough information))\W*$",
            r"\bno (?:relevant |such |specific |further )?(?:information|mention|answer)\b",
            r"\b(?:not enough|insufficient|lack of) (?:information|context|evidence)\b",
            r"\bi (?:do not|don't) know\b",
            rf"\b{_CANNOT} be (?:determined|answered|found|inferred)\b",
            rf"\b(?:{_CANNOT}|unable to) (?:determine|answer|find|infer|tell)\b",
        )
    )
)


def abstains(reply: str) -> bool:
    """Whether a reply declines the question: its first line says that nothing is known."""
    line = reply.strip().lower().replace("\u2019", "'").partition("\n")[0]
    return _ABSTAINED.search(line) is not None
