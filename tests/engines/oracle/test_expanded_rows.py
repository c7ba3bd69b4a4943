"""The oracle's rows and mask, against what one writes down by hand."""

import pytest
import torch

from picbench.engines.oracle import (
    ExpandedRow,
    OracleSegment,
    Rule,
    epic,
    epic_zero,
    expand,
    full,
    mepic,
    naive,
    visible,
)

ABC: list[OracleSegment] = [("text", [1]), ("chunk", [2, 3]), ("chunk", [4, 5]), ("text", [6])]


def request_rows(segments: list[OracleSegment], rule: Rule) -> list[tuple[int, int]]:
    rows = expand(segments, (), rule)
    return [(row.token, row.position) for row in rows if row.compiled is None]


def reused_rows(segments: list[OracleSegment], rule: Rule) -> list[tuple[int, int]]:
    rows = expand(segments, (), rule)
    return [(row.token, row.position) for row in rows if row.compiled is not None and row.reused]


def test_rows_of_a_linked_request() -> None:
    assert expand(ABC, [7, 8], epic(1)) == [
        ExpandedRow(2, 1, compiled=0),
        ExpandedRow(3, 2, compiled=0),
        ExpandedRow(4, 3, compiled=1, reused=False),
        ExpandedRow(5, 4, compiled=1),
        ExpandedRow(1, 0),
        ExpandedRow(4, 3),
        ExpandedRow(6, 5),
        ExpandedRow(7, 6),
        ExpandedRow(8, 7),
    ]


def test_mask_of_a_linked_request() -> None:
    expected = [
        # 2  3  4' 5  1  4  6   (4' is replaced by 4)
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 1, 1, 1, 1],
    ]
    assert torch.equal(visible(expand(ABC, (), epic(1))), torch.tensor(expected).bool())


def test_mask_of_an_anchored_request() -> None:
    rows = expand(
        [("text", [1]), ("chunk", [2]), ("chunk", [3]), ("text", [4])], (), naive().anchored()
    )
    expected = [
        # 1' 2  1" 3  1  4   (1' and 1" anchor the chunks after them)
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 1, 0, 1, 1, 1],
    ]
    assert torch.equal(visible(rows), torch.tensor(expected).bool())
    assert [row.position for row in rows] == [1, 2, 2, 3, 1, 4]


def test_mask_of_chunks_in_documents() -> None:
    """Each chunk is compiled after the anchor and then its own document, which is longer."""
    rule = naive().anchored().within([(), (8, 9)])
    rows = expand([("text", [1]), ("chunk", [2]), ("chunk", [3]), ("text", [4])], (), rule)
    expected = [
        # 1' 2  1" 8" 9" 3  1  4
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 1, 1, 1],
    ]
    assert torch.equal(visible(rows), torch.tensor(expected).bool())
    assert [row.token for row in rows] == [1, 2, 1, 8, 9, 3, 1, 4]
    assert [row.position for row in rows] == [3, 4, 2, 3, 4, 5, 3, 6]


def test_anchor_of_a_leading_chunk_starts_at_zero() -> None:
    rows = expand([("chunk", [5, 6]), ("text", [7])], (), epic_zero(bos=1))
    assert rows[:4] == [ExpandedRow(1, position, 0, reused=False) for position in range(4)]
    assert rows[4:] == [ExpandedRow(5, 4, 0), ExpandedRow(6, 5, 0), ExpandedRow(7, 6)]


def test_paper_pads_take_positions_and_are_seen() -> None:
    segments: list[OracleSegment] = [
        ("text", [1]),
        ("chunk", [2] * 15),
        ("text", [3]),
        ("text", [4, 5]),
    ]
    rule = mepic().padded(0)
    assert reused_rows(segments, rule) == []
    assert request_rows(segments, rule) == [
        *((1, 0), *((0, i) for i in range(1, 16))),
        *((0, 16), *((2, i) for i in range(17, 32))),
        *((3, 32), (4, 33), (5, 34)),
    ]


def test_paper_pads_end_a_text_between_chunks_but_not_the_prompt() -> None:
    segments: list[OracleSegment] = [("chunk", [2] * 16), ("text", [3]), ("chunk", [4] * 17)]
    rows = expand(segments, (), naive().padded(0))
    assert [row.token for row in rows if row.compiled == 1] == [0] * 15 + [4] * 17
    assert request_rows(segments, naive().padded(0))[:2] == [(3, 16), (0, 17)]
    assert request_rows(segments, naive().padded(0))[-1] == (4, 63)


def test_anchor_under_paper_pads_is_the_padded_text() -> None:
    rows = expand([("text", [1]), ("chunk", [2] * 16)], (), naive().anchored().padded(0))
    assert [row.token for row in rows[:17]] == [1] + [0] * 15 + [2]


def test_question_may_be_empty() -> None:
    segments: list[OracleSegment] = [("chunk", [2, 3]), ("chunk", [4, 5]), ("text", [])]
    assert request_rows(segments, naive()) == [(5, 3)]
    assert reused_rows(segments, naive()) == [(2, 0), (3, 1), (4, 2)]


@pytest.mark.parametrize("rule", [full(), naive(), epic(1), mepic()])
def test_split_text_is_one_text(rule: Rule) -> None:
    split: list[OracleSegment] = [
        ("text", [1]),
        ("text", [2]),
        ("chunk", [3]),
        ("text", []),
        ("text", [4]),
    ]
    whole: list[OracleSegment] = [("text", [1, 2]), ("chunk", [3]), ("text", [4])]
    assert expand(split, [5], rule.padded(0)) == expand(whole, [5], rule.padded(0))


def test_repeated_chunk_is_compiled_twice() -> None:
    rows = expand([("chunk", [2, 3]), ("chunk", [2, 3]), ("text", [4])], (), naive())
    assert [row.compiled for row in rows] == [0, 0, 1, 1, None]


@pytest.mark.parametrize(
    ("rule", "linked"),
    [
        (full(), (20, 20)),
        (naive(), (0, 0)),
        (epic(1), (0, 1)),
        (epic(64), (0, 20)),
        (epic_zero(bos=1), (0, 0)),
        (mepic(), (16, 16)),
    ],
)
def test_linked_tokens_of_each_algorithm(rule: Rule, linked: tuple[int, int]) -> None:
    assert tuple(len(rule.links(index, 20)) for index in (0, 1)) == linked
    assert tuple(rule.links(1, 20)) == tuple(range(linked[1]))
