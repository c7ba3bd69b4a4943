"""What was sent comes back from workload.jsonl."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.store.writer import StoredSegment, read_workload, write_workload
from picbench.workloads.facts import chunk_id, chunk_sets
from picbench.workloads.sample import Sample, SampleSegment

TEXTS = st.text(st.characters(codec=None), max_size=5)
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
# A chunk is known by its tokens, so that these decide its text.
SEGMENTS = st.one_of(
    st.builds(SampleSegment, st.just("text"), TEXTS, TOKENS),
    TOKENS.map(lambda tokens: SampleSegment("chunk", "c" * (sum(tokens) % 3), tokens)),
)


def write(path: Path, samples: list[Sample]) -> list[str]:
    write_workload(path, samples, chunk_sets(samples))
    return path.read_text("utf-8").splitlines()


@given(st.lists(st.lists(SEGMENTS, max_size=4), min_size=1, max_size=4))
def test_samples_come_back(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[SampleSegment]]
) -> None:
    samples = [
        Sample(f"s{n}", "musique", tuple(own), ("yes", "\ud800"), 9)
        for n, own in enumerate(prompts)
    ]
    path = tmp_path_factory.mktemp("run") / "workload.jsonl"
    write_workload(path, samples, chunk_sets(samples))
    found = read_workload(path)
    assert list(found) == [sample.id for sample in samples]
    for sample in samples:
        stored = found[sample.id]
        assert (stored.answers, stored.max_tokens) == (list(sample.answers), 9)
        for segment, kept in zip(sample.segments, stored.segments, strict=True):
            assert kept.tokens == len(segment.tokens)
            assert kept.text == (segment.text or None)
            assert kept.ids == (None if segment.text else list(segment.tokens))
            assert kept.chunk == (chunk_id(segment) if segment.kind == "chunk" else None)


def test_a_chunk_is_written_once_before_its_first_sample(tmp_path: Path) -> None:
    chunk, question = SampleSegment("chunk", "c", (1,)), SampleSegment("text", "q", (2, 3))
    lines = write(tmp_path / "w", [Sample(n, "d", (chunk, chunk, question), (), 1) for n in "ab"])
    assert [next(iter(json.loads(line))) for line in lines] == ["chunk", "sample", "sample"]
    found = read_workload(tmp_path / "w")["b"].segments
    assert found[2] == StoredSegment(tokens=2, text="q")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}\n",
        '{"chunk": "a"}\n',
        '{"sample": "a"}\n',
        '{"sample": "a", "segments": [{"chunk": "b"}]}\n',
    ],
)
def test_other_contents_are_value_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "w").write_text(text)
    with pytest.raises(ValueError):
        read_workload(tmp_path / "w")
