"""Chunks that know what stands before them in their document, and prompts without leads."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import DataError
from picbench.workloads.datasets import find
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.drop import leads
from picbench.workloads.prompts.segmentation import before, before_in_sections
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sources.bundled import bundled_file
from picbench.workloads.synthetic.generate import rows

ARTICLES = [
    "Passage 1:\nOslo\nIt is old.\n",
    "Passage 2:\nRome\nIt is older.\n",
    "Passage 3:\nOslo\nIt burned.\n",
    "Passage 4:\n\nNo title.\n",
    "Passage 5:\nOslo\nIt was built again.",
]
ROW = {"input": "?", "context": "".join(ARTICLES), "answers": ["x"], "_id": "r"}

texts = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=8)


@given(texts, st.data())
def test_what_is_before_a_chunk_is_its_document_so_far(chunks: list[str], data: Any) -> None:
    names = data.draw(st.lists(st.integers(0, 2), min_size=len(chunks), max_size=len(chunks)))
    found = before(chunks, names)
    for name in set(names):
        own = [i for i, other in enumerate(names) if other == name]
        so_far = ["".join(chunks[i] for i in own[:n]) for n in range(len(own))]
        assert [found[i] for i in own] == so_far


def test_passages_of_one_title_are_one_document() -> None:
    found = find("musique").before(ARTICLES)
    assert found == ["", "", ARTICLES[0], "", ARTICLES[0] + ARTICLES[2]]


@pytest.mark.parametrize("name", ["samsum", "multi_news"])
def test_dialogues_and_articles_are_documents(name: str) -> None:
    chunks = {
        "samsum": ["Dialogue: A: hi\nSummary: A.\n", "Dialogue: B: bye\nSummary: B."],
        "multi_news": ["Passage 1:\nRain\n", "Passage 2:\nRain\n"],
    }[name]
    assert find(name).before(chunks) == ["", ""]


@pytest.mark.parametrize("name", ["musique", "samsum", "multi_news", "needle"])
def test_text_without_marks_is_one_document(name: str) -> None:
    assert find(name).before(["One. ", "Two. ", "Three."]) == ["", "One. ", "One. Two. "]


def test_sections_of_a_haystack_are_documents() -> None:
    chunks = ["Section 1: Ada\n1.1 x.\n", "1.2 y.\nSection 2: Bo\n2.1 z. ", "Here.\n"]
    found = before_in_sections([*chunks, "Section 3: Cy"])
    assert found == ["", chunks[0], "Section 2: Bo\n2.1 z. ", ""]


def test_a_row_may_say_what_its_passages_are_from() -> None:
    found = find("musique").before(ARTICLES, (7, 7, 8, 7, 8))
    assert found == ["", ARTICLES[0], "", ARTICLES[0] + ARTICLES[1], ARTICLES[2]]


@pytest.mark.parametrize("dataset", ["musique", "multi_news"])
def test_bundled_rows_number_accounts(dataset: str) -> None:
    """A passage goes on with the account before it exactly if its title says so."""
    for row in rows(dataset, count=20):
        titles = [part.split("\n")[1] for part in f"\n{row['context']}".split("\nPassage ")[1:]]
        starts = ("Continued", "Second part", "More of the same", "The same, continued")
        goes_on = [title.startswith(starts) for title in titles]
        assert [a == b for a, b in pairwise(row["documents"])] == goes_on[1:]


def test_samples_know_documents_where_they_are_wanted(
    write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    data = write_rows("musique", ROW)
    [plain] = load_samples("musique", data, word_tokenizer)
    [known] = load_samples("musique", data, word_tokenizer, documents=True)
    assert all(chunk.before is None for chunk in plain.chunks)
    contexts = [chunk.before.text if chunk.before else "" for chunk in known.chunks]
    assert contexts == find("musique").before(ARTICLES)
    assert known.chunks[4].context == known.chunks[0].tokens + known.chunks[2].tokens
    assert known.without_documents() == plain


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"documents": [0, 1]}, r"rows.jsonl:1: 2 documents for 5 passages"),
        ({"gold_passages": [5]}, r"rows.jsonl:1: gold passage 5 of 5"),
        ({"documents": ["a"]}, "field 'documents.0'"),
        ({"gold_passages": [-1]}, "field 'gold_passages.0'"),
    ],
)
def test_wrong_fields_of_a_row_are_named(
    fields: dict[str, Any], problem: str, write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match=problem):
        load_samples("musique", write_rows("musique", ROW | fields), word_tokenizer)


def test_leads_are_what_gold_passages_continue() -> None:
    assert leads([0, 1, 0, 2, 0], [4]) == {0, 2}
    assert leads([0, 1, 0, 2, 0], [2, 4]) == {0}
    assert leads([0, 0], [0]) == set()


def test_prompts_without_leads(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    """Rows that have none are left out, and the limit counts those that stay."""
    given = ({"gold_passages": [1]}, {"gold_passages": [4]}, {}, {"gold_passages": [0, 2, 4]})
    data = write_rows(
        "musique", *(ROW | fields | {"_id": str(n)} for n, fields in enumerate(given))
    )
    [sample] = load_samples("musique", data, word_tokenizer, documents=True, drop="lead", limit=3)
    assert sample.id == "1"
    assert [chunk.text for chunk in sample.chunks] == [ARTICLES[1], ARTICLES[3], ARTICLES[4]]
    before_last = sample.chunks[2].before
    assert before_last is not None
    assert before_last.text == ARTICLES[0] + ARTICLES[2]


@pytest.mark.parametrize(("dataset", "count"), [("musique", 176), ("samsum", 0)])
def test_bundled_rows_with_a_lead(
    dataset: str, count: int, word_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = bundled_file(dataset, tmp_path)
    if not count:
        with pytest.raises(DataError, match="`drop=lead`: no row of 'samsum'"):
            load_samples(dataset, data, word_tokenizer, drop="lead")
        return
    assert len(load_samples(dataset, data, word_tokenizer, drop="lead")) == count
