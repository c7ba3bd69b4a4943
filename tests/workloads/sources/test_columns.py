import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets import Reading, find
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.segmentation import passages as cut
from picbench.workloads.sources.columns import FIELDS, NAMED, parse_columns
from picbench.workloads.sources.records import Record
from picbench.workloads.sources.row import BadRows, DatasetRow, read_rows
from picbench.workloads.sources.source import RowSource

SQUAD = {
    "id": "s1",
    "title": "Oslo",
    "context": "Oslo is the capital of Norway.",
    "question": "Where is Oslo?",
    "answers": {"text": ["Norway", "in Norway"], "answer_start": [23, 20]},
}
QAS = [
    {"id": "q1", "question": "Where?", "answers": [{"text": "Norway", "answer_start": 23}]},
    {"id": "q2", "question": "What?", "answers": [{"text": "capital"}, {"text": "the capital"}]},
]
ARTICLE = {"title": "Oslo", "paragraphs": [{"context": SQUAD["context"], "qas": QAS}]}
TITLES = ["Ada", "Oslo", "Rome"]
SENTENCES = [["Ada lived in Oslo."], ["Oslo is old.", " It lies in Norway."], ["Rome."]]
HOTPOT = {
    "_id": "h1",
    "question": "In which country did Ada live?",
    "answer": "Norway",
    "supporting_facts": [["Ada", 0], ["Oslo", 1]],
    "context": [list(pair) for pair in zip(TITLES, SENTENCES, strict=True)],
}
HOTPOT_ON_THE_HUB = HOTPOT | {
    "supporting_facts": {"title": ["Ada", "Oslo"], "sent_id": [0, 1]},
    "context": {"title": TITLES, "sentences": SENTENCES},
}
MUSIQUE = {
    "id": "m1",
    "question": HOTPOT["question"],
    "answer": "Norway",
    "answer_aliases": ["Kingdom of Norway"],
    "paragraphs": [
        {"idx": n, "title": title, "paragraph_text": "".join(text), "is_supporting": n < 2}
        for n, (title, text) in enumerate(zip(TITLES, SENTENCES, strict=True))
    ],
}
CONTEXT = (
    "Passage 1:\nAda\nAda lived in Oslo.\n"
    "Passage 2:\nOslo\nOslo is old. It lies in Norway.\n"
    "Passage 3:\nRome\nRome."
)


def rows(columns: str, *values: Mapping[str, Any], bad: BadRows | None = None) -> list[DatasetRow]:
    records = [Record(f"f:{n}", value) for n, value in enumerate(values, start=1)]
    return list(read_rows(records, "qa", bad or BadRows(), parse_columns(columns)))


def test_the_columns_of_squad() -> None:
    (row,) = rows("squad", SQUAD)
    assert (row.id, row.input, row.context) == ("s1", SQUAD["question"], SQUAD["context"])
    assert row.answers == ("Norway", "in Norway")


def test_answers_may_be_a_list_as_in_newsqa() -> None:
    (row,) = rows("squad", SQUAD | {"answers": ["Norway"]})
    assert row.answers == ("Norway",)


def test_a_file_of_squad_has_a_row_for_each_question() -> None:
    first, second = rows("squad-file", ARTICLE)
    assert (first.id, first.input, first.answers) == ("q1", "Where?", ("Norway",))
    assert (second.id, second.answers) == ("q2", ("capital", "the capital"))
    assert first.context == second.context == SQUAD["context"]
    assert (first.source, second.source) == ("f:1.1", "f:1.2")


def test_mrqa_has_a_row_for_each_question() -> None:
    record = {
        "context": "Oslo lies in Norway.",
        "qas": [{"qid": "a", "question": "Where?", "answers": ["Norway"]}],
    }
    header = {"header": {"dataset": "NewsQA"}}
    bad = BadRows(skip=True)
    (row,) = rows("mrqa", header, record, bad=bad)
    assert (row.id, row.context, row.answers) == ("a", "Oslo lies in Norway.", ("Norway",))
    assert bad.skipped == ["f:1: column 'qas' of 'each' is no list of objects; there are: header"]


def test_the_columns_of_narrativeqa() -> None:
    record = {
        "document": {"id": "d", "summary": {"text": "A tale."}, "text": "Once upon a time."},
        "question": {"text": "What?", "tokens": ["What", "?"]},
        "answers": [{"text": "a tale"}, {"text": "tale"}],
    }
    (row,) = rows("narrativeqa", record)
    assert (row.input, row.context, row.answers) == ("What?", "A tale.", ("a tale", "tale"))
    (whole,) = rows("narrativeqa,context=document.text", record)
    assert whole.context == "Once upon a time."


@pytest.mark.parametrize(
    ("columns", "record", "answers"),
    [
        ("hotpotqa", HOTPOT, ("Norway",)),
        ("hotpotqa", HOTPOT_ON_THE_HUB, ("Norway",)),
        (
            "hotpotqa",
            HOTPOT | {key: json.dumps(HOTPOT[key]) for key in ("context", "supporting_facts")},
            ("Norway",),
        ),
        ("musique", MUSIQUE, ("Norway", "Kingdom of Norway")),
    ],
)
def test_passages_become_longbenchs_context(
    columns: str, record: Mapping[str, Any], answers: tuple[str, ...]
) -> None:
    (row,) = rows(columns, record)
    assert row.context == CONTEXT
    assert row.answers == answers
    assert row.gold == (0, 1)
    assert find("qa").split(row.context, lambda texts: [1 for _ in texts]) == cut(CONTEXT)


def test_passages_may_be_texts_alone() -> None:
    (row,) = rows("passages=docs", {"input": "q", "docs": ["one", "two"], "answers": "a"})
    assert row.context == "Passage 1:\none\nPassage 2:\ntwo"


@pytest.mark.parametrize(
    ("docs", "named"),
    [
        ("text", "no list"),
        ([], "no list"),
        ([3], "neither text, pair nor object"),
        ([["t", 3]], "neither text nor a list of sentences"),
        ([{"t": "x"}], "no column 'text' for 'body' in a passage; there are: t"),
        ({"title": ["a"]}, "no column 'text' for 'body'"),
        ({"title": ["a"], "text": ["b", "c"]}, "1 titles for 2 passages"),
    ],
)
def test_passages_of_another_form_are_named(docs: Any, named: str) -> None:
    values = {"input": "q", "docs": docs, "answers": "a"}
    with pytest.raises(DataError, match=named) as caught:
        rows("passages=docs,title=title,body=text", values)
    assert caught.value.message.startswith("f:1: ")


def test_lists_may_be_json_as_text() -> None:
    """As in PopQA's answers; one that is a text alone stays one."""
    values = {"q": "q", "context": "c", "a": '["Norway", "Kingdom of Norway"]', "g": "[0]"}
    (row,) = rows("input=q,answers=a,gold_passages=g", values)
    assert (row.answers, row.gold) == (("Norway", "Kingdom of Norway"), (0,))
    (row,) = rows("input=q,answers=a", values | {"a": "[sic] Norway"})
    assert row.answers == ("[sic] Norway",)


@pytest.mark.parametrize("needed", [True, 1, "true"])
def test_what_supports_an_answer_may_be_said_in_several_forms(needed: Any) -> None:
    docs = [{"t": None, "b": "x", "s": False}, {"t": "T", "b": "y", "s": needed}]
    values = {"q": "q", "docs": docs, "a": "yes"}
    (row,) = rows("input=q,answers=a,passages=docs,title=t,body=b,supports=s", values)
    assert row.gold == (1,)
    lists = {"t": [None, "T"], "b": ["x", "y"]}
    (same,) = rows("input=q,answers=a,passages=docs,title=t,body=b", values | {"docs": lists})
    assert same.context == row.context == "Passage 1:\nx\nPassage 2:\nT\ny"


def test_fields_that_are_not_named_are_longbenchs() -> None:
    values = {"query": "q", "context": "c", "answers": ["a"]}
    (row,) = rows("input=query", values)
    assert (row.input, row.context, row.answers) == ("q", "c", ("a",))


def test_an_empty_column_is_an_empty_input() -> None:
    (row,) = rows("input=,context=document,answers=summary", {"document": "d", "summary": "s"})
    assert (row.input, row.context, row.answers) == ("", "d", ("s",))


def test_a_number_in_a_path_picks_an_element() -> None:
    values = {"asked": ["Who?", "Whose?"], "context": "c", "answers": ["a"]}
    (row,) = rows("input=asked.1", values)
    assert row.input == "Whose?"


@pytest.mark.parametrize(
    ("columns", "field", "column"),
    [
        ("input=query", "input", "query"),
        ("squad,context=text", "context", "text"),
        ("squad,answers=answers.texts", "answers", "answers.texts"),
        ("squad,id=key", "id", "key"),
        ("squad,gold_passages=gold", "gold_passages", "gold"),
    ],
)
def test_a_column_that_is_not_there_is_named(columns: str, field: str, column: str) -> None:
    with pytest.raises(DataError) as caught:
        rows(columns, SQUAD)
    assert caught.value.message == (
        f"f:1: no column {column!r} for {field!r}; there are: id, title, context, question, answers"
    )


def test_rows_that_lack_a_column_can_be_skipped() -> None:
    bad = BadRows(skip=True)
    values = {key: value for key, value in SQUAD.items() if key != "question"}
    assert [row.id for row in rows("squad", values, SQUAD, bad=bad)] == ["s1"]
    assert len(bad.skipped) == 1


def test_one_bad_question_leaves_the_others_of_its_article() -> None:
    bad = BadRows(skip=True)
    qas = [QAS[0], QAS[0] | {"answers": []}, QAS[1]]
    article = {"paragraphs": [{"context": "c", "qas": qas}]}
    assert [row.id for row in rows("squad-file", article, bad=bad)] == ["q1", "q2"]
    assert [message.split(": ")[0] for message in bad.skipped] == ["f:1.2"]


@pytest.mark.parametrize(
    ("columns", "record"),
    [
        ("musique", MUSIQUE | {"answerable": False}),
        ("musique", MUSIQUE | {"answerable": "false"}),
        ("musique", MUSIQUE | {"answer": "-", "answer_aliases": ["The", " "]}),
        (
            "passages=paragraphs,body=paragraph_text,input=question,answers=answer",
            MUSIQUE | {"answerable": 0},
        ),
        ("squad", SQUAD | {"is_impossible": True}),
        ("squad", SQUAD | {"answers": {"text": [], "answer_start": []}}),
        ("squad", SQUAD | {"answers": None}),
        ("squad", SQUAD | {"answers": {"text": ["CANNOTANSWER"]}}),
        ("hotpotqa", HOTPOT | {"answer": 1931}),
        ("input=question", SQUAD | {"answers": ["Norway"], "unanswerable": True}),
        ("input=question", SQUAD | {"answers": ["Unanswerable."]}),
        *(("input=question", SQUAD | {"answers": [gold]}) for gold in ("", "  ", "A", "The", "-")),
    ],
)
def test_rows_that_no_reply_answers_are_malformed(
    columns: str, record: Mapping[str, Any], tmp_path: Path
) -> None:
    good = record | {"answerable": True, "is_impossible": False, "unanswerable": None}
    good |= {"answer": "Norway", "answers": ["The", "Norway", ""]}
    (tmp_path / "qa.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(good)}\n")
    source = RowSource(tmp_path, columns=parse_columns(columns))
    with pytest.raises(DataError, match=r"qa\.jsonl:1: .*`on_bad_row=skip`"):
        list(find("qa").rows(source, Reading(len)))
    reading = Reading(len, bad=BadRows(skip=True))
    (row,) = find("qa").rows(source, reading)
    assert "Norway" in row.answers
    assert not {"", "The"} & {*row.answers}
    assert len(reading.bad.skipped) == 1


def test_only_the_questions_of_an_article_that_have_an_answer_are_rows() -> None:
    bad = BadRows(skip=True)
    qas = [QAS[0] | {"is_impossible": False}, QAS[1] | {"is_impossible": True}]
    article = {"paragraphs": [{"context": "c", "qas": qas}]}
    assert [row.id for row in rows("squad-file", article, bad=bad)] == ["q1"]
    assert bad.skipped == ["f:1.2: unanswerable: 'is_impossible' is true"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("question=query", "`columns` 'question': no such field"),
        ("squat", "did you mean 'squad'"),
        ("", "no mapping is called that"),
        ("none.yaml", r"`columns` none\.yaml: No such file"),
    ],
)
def test_a_mapping_that_is_none_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_columns(text)


def test_a_file_may_have_the_mapping(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: squad\ninput: asked.0\n")
    found = parse_columns(str(file))
    assert found.of == parse_columns("squad,input=asked.0").of
    file.write_text("- input\n")
    with pytest.raises(ConfigError, match="not a map of fields to columns"):
        parse_columns(str(file))


@pytest.mark.parametrize("name", NAMED)
def test_named_mappings_have_known_fields(name: str) -> None:
    assert set(parse_columns(name).of) <= set(FIELDS)


def test_bundled_rows_have_longbenchs_columns() -> None:
    from picbench.workloads.sources.source import locate

    with pytest.raises(ConfigError, match="`columns`: rows of `data=bundled`"):
        locate("bundled", "musique", columns="squad")


def test_samples_are_made_by_the_columns(tmp_path: Path, word_tokenizer: Any) -> None:
    (tmp_path / "qa.jsonl").write_text(json.dumps(HOTPOT) + "\n")
    source = RowSource(tmp_path, columns=parse_columns("hotpotqa"))
    (sample,) = load_samples("qa", source, word_tokenizer)
    assert [chunk.text for chunk in sample.chunks] == cut(CONTEXT)
    assert sample.id == "h1"
    assert find("qa").score("Norway", sample.answers) == 1.0


TEXT = st.text(st.characters(categories=["L", "N", "P", "Zs"]), min_size=1, max_size=20)


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_every_form_of_passages_gives_the_same_context(pairs: list[tuple[str, list[str]]]) -> None:
    """Pairs, objects, and an object of lists are the same passages."""
    forms = (
        [list(pair) for pair in pairs],
        [{"t": title, "b": body} for title, body in pairs],
        {"t": [title for title, _ in pairs], "b": [body for _, body in pairs]},
    )
    found = [
        rows("passages=p,title=t,body=b", {"input": "q", "p": form, "answers": "a"})[0].context
        for form in forms
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].count("Passage ") >= len(pairs)
