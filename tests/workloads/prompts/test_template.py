import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.workloads.prompts.template import Template, read_prompt


def test_renders_both_sides() -> None:
    template = Template("Ask {input} of\n{context}\nQ: {input}\nA:")
    assert template.render("why") == ("Ask why of\n", "\nQ: why\nA:")


def test_doubled_braces_are_literal() -> None:
    assert Template("{{x}} {context}").render("") == ("{x} ", "")


@given(st.text())
def test_questions_are_never_read_as_templates(question: str) -> None:
    assert Template("{context}{input}").render(question) == ("", question)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no place for it: {input}", "{context}"),
        ("{context} and {context}", "exactly once"),
        ("{context} {question}", "{question}"),
        ("{context} {}", "{}"),
        ("{context", "expected"),
    ],
)
def test_wrong_templates_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Template(text, where="prompts.json: musique")
    assert caught.value.message.startswith("prompts.json: musique: ")
    assert problem in caught.value.message


def write(path: Path, content: Any) -> Path:
    file = path / "prompts.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_reads_longbenchs_format(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"dataset2prompt": {"musique": "x{context}y{input}"}, "dataset2maxlen": {"musique": 32}},
    )
    template, tokens = read_prompt(file, "musique")
    assert (template.render("q"), tokens) == (("x", "yq"), 32)


def test_reads_a_flat_map(tmp_path: Path) -> None:
    template, tokens = read_prompt(write(tmp_path, {"musique": "{context}{input}"}), "musique")
    assert (template.render("q"), tokens) == (("", "q"), None)


def test_a_missing_dataset_names_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, {"musique": "{context}"})
    with pytest.raises(ConfigError, match=r"prompts\.json.*'music'.*did you mean 'musique'"):
        read_prompt(file, "music")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"dataset2prompt": {"musique": 3}}, "dataset2prompt.musique"),
        ({"dataset2prompt": {}, "dataset2maxlen": {"musique": 0}}, "dataset2maxlen.musique"),
        ([], "prompts.json"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, content: Any, named: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_prompt(file, "musique")
    assert named in caught.value.message
    assert str(file) in caught.value.message


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        read_prompt(tmp_path / "nothing.json", "musique")
