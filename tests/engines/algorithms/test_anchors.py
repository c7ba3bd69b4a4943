"""Anchors by name: their notation, their texts and their tokens."""

from pathlib import Path

import pytest

from picbench.engines.algorithms import find_tokens, parse, read_text, stand_ins
from picbench.engines.planning.policy import Anchor
from picbench.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "anchor"),
    [
        ("off", Anchor()),
        ("head", Anchor(head=True)),
        ("passage", Anchor(head=True, text="passage")),
        ("./other.txt", Anchor(head=True, text="./other.txt")),
        ("sample-2", Anchor(head=True, text="sample-2")),
        ("/far/away", Anchor(head=True, text="/far/away")),
    ],
)
def test_a_spec_names_an_anchor(given: str, anchor: Anchor) -> None:
    algorithm = parse(f"naive:anchor={given}")
    assert algorithm.plan_chunk(0, 9).anchor == anchor
    assert algorithm.anchor_text == anchor.text
    assert algorithm.spec == ("naive" if given == "off" else f"naive:anchor={given}")


@pytest.mark.parametrize("given", ["on", "hed", "", "passages", "sample-0", "sample"])
def test_a_mistyped_word_is_no_file(given: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not possible \(use off\|head\|passage\|sample-N\|./FILE"
    ):
        parse(f"mepic:anchor={given}")


def test_the_passage_is_as_long_as_trained_models_need() -> None:
    text = read_text("passage")
    assert 750 <= len(text.split()) <= 850  # docs/accuracy.md: 500 keep less, 1,600 no more.
    assert text.endswith(".\n\n")
    assert list(stand_ins("passage")) == ["passage"]
    assert not stand_ins("")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b" \n", "is empty"), (b"\xff\xfe\x00", "it is not UTF-8")],
)
def test_a_file_without_text_is_one_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "anchor.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        find_tokens({}, str(path), lambda text: tuple(map(ord, text)))
    assert "\n" not in str(caught.value)


def test_tokens_are_those_given_or_those_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "anchor.txt"
    path.write_text("abc")

    def encode(text: str) -> list[int]:
        return [len(text)]

    found = find_tokens({"passage": [7]}, str(path), encode)
    assert found == {"passage": [7], str(path): (3,)}
    assert find_tokens({}, "", encode).keys() == {"passage"}
    assert find_tokens({}, "", None) == {}
    with pytest.raises(ConfigError, match="only picbench run knows its traffic"):
        find_tokens({}, "sample-2", encode)
    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        find_tokens({}, "passage", None)
