"""What GitHub Actions is told."""

import io
from pathlib import Path

import pytest

from picbench.store.provenance import annotation, write_step_summary


def test_annotations_escape_what_ends_them() -> None:
    found = annotation("error", "mepic: a,b", "100 % of\nlines")
    assert found == "::error title=mepic%3A a%2Cb::100 %25 of%0Alines"


def test_a_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, stream = tmp_path / "summary", io.StringIO()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    write_step_summary("a\n", stream)
    write_step_summary("b\n", stream)
    assert file.read_text() == "a\nb\n"
    assert stream.getvalue() == ""


def test_a_summary_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        write_step_summary("a\n", io.StringIO())
    assert caught.value.filename == "/dev/full"


def test_elsewhere_it_goes_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    stream = io.StringIO()
    write_step_summary("a\n", stream)
    assert stream.getvalue() == "a\n"
