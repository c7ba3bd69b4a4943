"""Replies that decline a question."""

import pytest

from picbench.workloads.datasets import find
from picbench.workloads.metrics.abstention import abstains


@pytest.mark.parametrize(
    "reply",
    [
        "The passages do not mention where she was born.",
        "The provided text doesn\u2019t say.",
        "This is not mentioned in the passages.",
        "Not mentioned.",
        "not explicitly stated",
        "unanswerable",
        "Unknown",
        "N/A",
        "I don't know.",
        "There is no information about the director in the passages.",
        "It cannot be determined from the passages",
        "Unable to determine",
        "Insufficient information",
        "No relevant information found.\nQ: And who",
        "文中没有提到她的出生地。",
        "根据提供的文章无法确定。",
        "沒有相關資訊",
        "未明确说明",
        "不知道。",
        "文章には記載されていません。",
        "わかりません",
        "不明です。",
        "알 수 없습니다.",
        "본문에 언급되지 않았습니다.",
        "ไม่ทราบ",
        "ในบทความไม่ได้ระบุไว้",
    ],
)
def test_replies_that_decline(reply: str) -> None:
    assert abstains(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Oslo",
        "no",
        "None of the Above",
        "The Unknown Soldier",
        "Not Without My Daughter",
        "No Country for Old Men",
        "He was mentioned in the passages as a painter",
        "Information Society",
        "I Know What You Did Last Summer",
        "Oslo\nThe passages do not mention more.",
        "北京",
        "没有",
        "那些你不知道的事",
        "東京です。",
        "서울",
        "กรุงเทพ",
    ],
)
def test_replies_that_answer(reply: str) -> None:
    assert not abstains(reply)


@pytest.mark.parametrize(
    ("dataset", "asks"), [("musique", True), ("needle", True), ("samsum", False)]
)
def test_only_questions_can_be_declined(dataset: str, asks: bool) -> None:
    assert find(dataset).abstained("not mentioned") is asks
