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
    ],
)
def test_replies_that_answer(reply: str) -> None:
    assert not abstains(reply)


@pytest.mark.parametrize(
    ("dataset", "asks"), [("musique", True), ("needle", True), ("samsum", False)]
)
def test_only_questions_can_be_declined(dataset: str, asks: bool) -> None:
    assert find(dataset).abstained("not mentioned") is asks
