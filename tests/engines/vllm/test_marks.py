"""Text is cut at the marks around its documents."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.vllm.marks import DEFAULT_MARKS, DocumentMarks, TextSpan
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

PAIRS = [DEFAULT_MARKS, ("[[d81f]]", "[[/d81f]]"), ("BEGIN", "END"), ("«", "»"), ("<a", "a>")]

#: What opens and closes without a counterpart, and where the error says it is.
MISPLACED = {
    "nested": ("a <<doc>>b <<doc>>c<</doc>>", "opening mark at character 11 .* inside a document"),
    "nested twice": ("<<doc>>b<<doc>>c<</doc>><</doc>>", "opening mark at character 8 "),
    "opened twice": ("<<doc>><<doc>>", "opening mark at character 7 .* inside a document"),
    "with an id inside": ("<<doc>>b<<doc id=a>>", "opening mark at character 8 .* inside"),
    "unclosed": (
        "a\n<<doc>>b",
        "opening mark at character 2 .* has no closing mark: 'a.n<<doc>>b'",
    ),
    "unclosed second": ("<<doc>>a<</doc>>b<<doc>>", "opening mark at character 17 .* no closing"),
    "unclosed with an id": ("<<doc id=k>>b", "opening mark at character 0 .* no closing mark"),
    "stray": ("ab<</doc>>", "closing mark at character 2 .* has no opening mark"),
    "closed twice": ("<<doc>>a<</doc>><</doc>>b", "closing mark at character 16 .* no opening"),
    "in the wrong order": ("<</doc>>a<<doc>>", "closing mark at character 0 .* no opening"),
    "an id without a key": ("<<doc id=>>a<</doc>>", "closing mark at character 12 .* no opening"),
    "an id of two words": ("<<doc id=a b>>a<</doc>>", "closing mark at character 15 .* no opening"),
    "in other letters": ("<<Doc>>a<</doc>>", "closing mark at character 8 .* no opening mark"),
}


@pytest.mark.parametrize(("text", "reason"), MISPLACED.values(), ids=MISPLACED)
def test_marks_without_their_counterparts_are_refused(text: str, reason: str) -> None:
    marks = DocumentMarks.of(True)
    assert marks is not None
    with pytest.raises(ConfigError, match=reason) as raised:
        marks.cut(text)
    assert "\n" not in str(raised.value)


REFUSED = {
    "a word": ("<<doc>>", "is no pair"),
    "a number": (1, "is no pair"),
    "a mapping": ({"open": "<", "close": ">"}, "is no pair"),
    "nothing": ([], "is no pair"),
    "one": (["<<doc>>"], "is no pair"),
    "three": (["<", "|", ">"], "is no pair"),
    "a number of two": (["<<doc>>", 7], "is no pair"),
    "null": ([None, "<</doc>>"], "is no pair"),
    "empty opening": (["", "<</doc>>"], "empty"),
    "empty closing": (["<<doc>>", ""], "empty"),
    "equal": (["|||", "|||"], "is or contains"),
    "closing in opening": (["<<doc>>", "doc"], "contains the other"),
    "opening in closing": (["doc>", "<doc>"], "contains the other"),
    "opening with an id in closing": (["<doc>", "<doc id=x>"], "contains the other"),
    "white space": (["<doc>\n", "</doc>"], "white space around"),
    "white space alone": ([" ", "\n"], "white space around"),
}


@pytest.mark.parametrize(("value", "reason"), REFUSED.values(), ids=REFUSED)
def test_pairs_that_cannot_be_told_apart_are_refused_at_start(value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"`marks` .*{reason}.*use true for ") as raised:
        PicSettings.read({"pic": {"marks": value}})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [None, False])
def test_they_are_off_by_default(value: Any) -> None:
    assert DocumentMarks.of(value) is None
    assert PicSettings().marks is None


CUTS = {
    "none": ("ab", [TextSpan(0, 2)]),
    "is no pair": ("", []),
    "one": ("a<<doc>>b<</doc>>c", [TextSpan(0, 1), TextSpan(8, 9, True), TextSpan(17, 18)]),
    "all": ("<<doc>>b\n<</doc>>", [TextSpan(7, 9, True)]),
    "empty": ("a<<doc>><</doc>>b", [TextSpan(0, 1), TextSpan(16, 17)]),
    "blank": ("a<<doc>> \n<</doc>>", [TextSpan(0, 1), TextSpan(8, 10)]),
    "ids": (
        "<<doc id=k-1>>a<</doc>><<doc>>b<</doc>>",
        [TextSpan(14, 15, True, "k-1"), TextSpan(30, 31, True)],
    ),
    "the shortest id": ("<<doc id=a>>b>><</doc>>", [TextSpan(12, 15, True, "a")]),
    "other marks": ("[doc]a[/doc]< /doc >", [TextSpan(0, 20)]),
}


@pytest.mark.parametrize(("text", "spans"), CUTS.values(), ids=CUTS)
def test_spans_have_the_text_and_no_marks(text: str, spans: list[TextSpan]) -> None:
    marks = DocumentMarks.of(list(DEFAULT_MARKS))
    assert marks is not None
    assert marks.cut(text) == spans


def test_marks_that_end_in_letters_have_no_ids() -> None:
    marks = DocumentMarks.of(["BEGIN", "END"])
    assert marks is not None
    assert marks.cut("BEGIN id=aEND") == [TextSpan(5, 10, True)]


DISJOINT = st.text("xy \n", max_size=5)


@given(
    pair=st.sampled_from(PAIRS),
    first=DISJOINT,
    rest=st.lists(st.tuples(st.none() | st.text("k1.-", min_size=1), DISJOINT, DISJOINT)),
)
def test_what_is_put_between_marks_is_found_there(
    pair: tuple[str, str], first: str, rest: list[tuple[str | None, str, str]]
) -> None:
    """Whatever the pair: documents, their ids, and the text between them, at their places."""
    opening, closing = pair
    head = opening.rstrip(">]")
    text, expected = first, [TextSpan(0, len(first))]
    for given_key, document, after in rest:
        key = given_key if 0 < len(head) < len(opening) else None
        text += opening if key is None else f"{head} id={key}{opening[len(head) :]}"
        end, chunk = len(text) + len(document), bool(document.strip())
        expected.append(TextSpan(len(text), end, chunk, key))
        text += document + closing
        expected.append(TextSpan(len(text), len(text) + len(after)))
        text += after
    marks = DocumentMarks.of(pair)
    assert marks is not None
    assert marks.cut(text) == [span for span in expected if span.start < span.end]


@given(
    pair=st.sampled_from(PAIRS),
    words=st.lists(st.sampled_from([*"ad<>[]/«» \n", *(mark for pair in PAIRS for mark in pair)])),
)
def test_spans_are_the_text_without_its_marks(pair: tuple[str, str], words: list[str]) -> None:
    """Any text is refused, or divided into marks and spans that do not meet."""
    text, marks = "".join(words), DocumentMarks.of(pair)
    assert marks is not None
    try:
        spans = marks.cut(text)
    except ConfigError:
        return
    texts = [text[span.start : span.end] for span in spans]
    assert "".join(texts) == marks.pattern.sub("", text)
    assert all(texts) and all(one.end < two.start for one, two in pairwise(spans))
    assert all(
        span.chunk == bool(one.strip())
        for span, one in zip(spans, texts, strict=True)
        if span.chunk
    )
