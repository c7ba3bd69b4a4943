"""Chunks that know what stands before them in their document, and prompts without leads."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import DataError
from picbench.workloads.datasets import Reading, find
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.drop import leads
from picbench.workloads.prompts.segmentation import before, before_in_sections
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sources.bundled import bundled_file
from picbench.workloads.sources.columns import parse_columns
from picbench.workloads.sources.row import BadRows
from picbench.workloads.sources.source import RowSource
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
    places = data.draw(st.lists(st.integers(0, 5), min_size=len(chunks), max_size=len(chunks)))
    found = before(chunks, names, places)
    for i, chunk in enumerate(chunks):
        same = [j for j, name in enumerate(names) if name == names[i]]
        earlier = sorted((j for j in same if places[j] < places[i]), key=places.__getitem__)
        contents = [chunks[j].strip() for j in earlier]
        once = [j for n, j in enumerate(earlier) if contents[n] not in contents[:n]]
        assert found[i] == "".join(chunks[j] for j in once if chunks[j].strip() != chunk.strip())
    assert before(chunks, names) == before(chunks, names, range(len(chunks)))


def test_the_order_of_passages_is_no_order_of_articles() -> None:
    assert find("musique").before(ARTICLES) == [""] * 5


def test_places_order_the_passages_of_one_title() -> None:
    found = find("musique").before(ARTICLES, (0, 1, 0, 3, 0), (3, 9, 1, 0, 2))
    assert found == [ARTICLES[2] + ARTICLES[4], "", "", "", ARTICLES[2]]


def test_a_passage_that_occurs_twice_is_not_before_itself() -> None:
    chunks = [f"Passage {n}:\nOslo\n{body}\n" for n, body in enumerate(("a", "b", "a", "c"), 1)]
    found = find("musique").before(chunks, (0, 0, 0, 0))
    assert found == ["", chunks[0], chunks[1], chunks[0] + chunks[1]]
    repeated = ["Same. ", "Same. "]
    assert find("musique").before(repeated) == ["", "Same. "]


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
    data = write_rows("musique", ROW | {"places": [0, 1, 2, 3, 4]})
    [plain] = load_samples("musique", data, word_tokenizer)
    [known] = load_samples("musique", data, word_tokenizer, documents=True)
    assert all(chunk.before is None for chunk in plain.chunks)
    contexts = [chunk.before.text if chunk.before else "" for chunk in known.chunks]
    assert contexts == find("musique").before(ARTICLES, (0, 1, 0, 3, 0))
    assert known.chunks[4].context == known.chunks[0].tokens + known.chunks[2].tokens
    assert known.without_documents() == plain


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"documents": [0, 1]}, r"rows.jsonl:1: 2 documents for 5 passages"),
        ({"places": [0, 1]}, r"rows.jsonl:1: 2 places for 5 passages"),
        ({"places": ["a"]}, "field 'places.0'"),
        ({"gold_passages": [5]}, r"rows.jsonl:1: gold passage 5 of 5"),
        ({"documents": ["a"]}, "field 'documents.0'"),
        ({"gold_passages": [-1]}, "field 'gold_passages.0'"),
    ],
)
def test_wrong_fields_of_a_row_are_named(
    fields: dict[str, Any], problem: str, write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    data = write_rows("musique", ROW | fields, ROW | {"_id": "good"})
    with pytest.raises(DataError, match=problem):
        load_samples("musique", data, word_tokenizer)
    bad = BadRows(skip=True)
    [sample] = load_samples("musique", data, word_tokenizer, bad_rows=bad)
    assert (sample.id, len(bad.skipped)) == ("good", 1)


def test_leads_are_what_gold_passages_continue() -> None:
    assert leads([0, 1, 0, 2, 0], [4]) == {0, 2}
    assert leads([0, 1, 0, 2, 0], [2, 4]) == {0}
    assert leads([0, 0], [0]) == set()
    assert leads([0, 1, 0], [0], [2, 0, 1]) == {2}


def test_prompts_without_leads(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    """Rows that have none are left out, and the limit counts those that stay."""
    given = ({"gold_passages": [1]}, {"gold_passages": [4]}, {}, {"gold_passages": [0, 2, 4]})
    data = write_rows(
        "musique",
        *(ROW | {"documents": [0, 1, 0, 3, 0], "_id": str(n)} | one for n, one in enumerate(given)),
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


FORMS = {
    "pairs": lambda t, b: [[title, [body]] for title, body in zip(t, b, strict=True)],
    "objects": lambda t, b: [{"t": x, "b": y} for x, y in zip(t, b, strict=True)],
    "lists": lambda t, b: {"t": t, "b": b},
    "json": lambda t, b: json.dumps([[title, [body]] for title, body in zip(t, b, strict=True)]),
}


@pytest.mark.parametrize("dataset", ["qa", "hotpotqa", "2wikimqa", "musique", "multi_news"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "quoted", ["Passage 7:", "Passage 3:", "Passage 2:", "Dialogue: x", "|||||"]
)
def test_passages_of_a_list_are_not_cut_again(
    dataset: str, form: str, quoted: str, write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    bodies = ["One.", f"Intro\n{quoted}\nquoted.", "Three."]
    row = {"q": "Q?", "p": FORMS[form](["A", "B", "C"], bodies), "answer": "yes", "gold": ["C"]}
    columns = "input=q,passages=p,title=t,body=b,answers=answer,gold_titles=gold"
    source = RowSource(write_rows(dataset, row), columns=parse_columns(columns))
    [sample] = load_samples(dataset, source, word_tokenizer, documents=True)
    assert [chunk.text.split("\n", 2)[2].strip() for chunk in sample.chunks] == bodies
    assert not sample.ordered
    assert all(chunk.before is None for chunk in sample.chunks)
    [row_read] = find(dataset).rows(source, Reading(len))
    assert row_read.gold == (2,)


def test_one_passage_of_a_list_is_one_chunk(write_rows: Any, word_tokenizer: Tokenizer) -> None:
    row = {"q": "Q?", "p": ["Word. " * 2_000], "answer": "yes"}
    columns = parse_columns("input=q,passages=p,answers=answer")
    source = RowSource(write_rows("qa", row), columns=columns)
    [sample] = load_samples("qa", source, word_tokenizer)
    assert len(sample.chunks) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_gold_passages_of_a_text_are_those_of_its_marks(
    end: str, write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    lines = ["Passage 1:", "A", "x", "Passage 2:", "B", "Passage 7:", "y", "Passage 3:", "C", "z"]
    row = {"input": "?", "context": end.join(lines), "answers": ["yes"], "gold_passages": [2]}
    row |= {"documents": [0, 1, 0], "_id": "r"}
    data = write_rows("musique", row)
    [sample] = load_samples("musique", data, word_tokenizer, documents=True, drop="lead")
    assert [chunk.text.split()[1] for chunk in sample.chunks] == ["2:", "3:"]
    twice = end.join(["Passage 1:", "Passage 2:", "Passage 2:", "x"])
    data = write_rows("musique", row | {"context": twice, "_id": "twice"}, row)
    bad = BadRows(skip=True)
    [same] = load_samples("musique", data, word_tokenizer, bad_rows=bad)
    assert same.id == "r"
    assert bad.skipped[0].startswith(f"{data}/musique/rows.jsonl:1: a passage quotes")


CTXS = [
    {"t": "Oslo", "b": "It burned.", "n": 7, "all": "It is old. It burned. It was built again."},
    {"t": "Rome", "b": "It is older.", "n": 0, "all": "It is older."},
    {"t": "Oslo", "b": "It is old.", "n": 2, "all": "It is old. It burned. It was built again."},
]


@pytest.mark.parametrize("how", ["places=ctxs.n", "articles=ctxs.all"])
def test_articles_know_their_order(how: str, write_rows: Any, word_tokenizer: Tokenizer) -> None:
    row = {"q": "Q?", "ctxs": CTXS, "answer": "yes"}
    columns = parse_columns(f"input=q,passages=ctxs,title=t,body=b,answers=answer,{how}")
    source = RowSource(write_rows("qa", row), columns=columns)
    [sample] = load_samples("qa", source, word_tokenizer, documents=True)
    assert [chunk.before and chunk.before.text for chunk in sample.chunks] == [
        sample.chunks[2].text,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("ctxs", "named"),
    [
        ([CTXS[0], CTXS[1] | {"all": "Another."}], "a passage is not in the text of its article"),
        ([CTXS[0], CTXS[1] | {"all": None}], "a passage is not in the text"),
    ],
)
def test_an_article_has_its_passage(ctxs: Any, named: str, write_rows: Any) -> None:
    columns = parse_columns("input=q,passages=ctxs,title=t,body=b,answers=answer,articles=ctxs.all")
    source = RowSource(
        write_rows("qa", {"q": "Q?", "ctxs": ctxs, "answer": "yes"}), columns=columns
    )
    with pytest.raises(DataError, match=named):
        list(find("qa").rows(source, Reading(len)))


def test_passages_without_a_title_are_from_no_document(
    write_rows: Any, word_tokenizer: Tokenizer
) -> None:
    context = "Passage 1:\n\nOne.\nPassage 2:\n\nTwo."
    row = {"input": "?", "context": context, "answers": ["yes"], "places": [0, 1]}
    [sample] = load_samples("qa", write_rows("qa", row), word_tokenizer, documents=True)
    assert [chunk.before for chunk in sample.chunks] == [None, None]
