"""A trace in RAGPulse's format, made up."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from picbench.errors import ConfigError, DataError
from picbench.workloads.traffic.corpus import SYNTHETIC
from picbench.workloads.traffic.ragpulse import LENGTHS, TRACE
from picbench.workloads.traffic.replay import TraceReplay, read_trace
from picbench.workloads.traffic.traffic_facts import measure


class Ids:
    """A tokenizer of which only the vocabulary is asked."""

    all_special_ids = tuple(range(100))
    bos_token_id = None

    def __len__(self) -> int:
        return 200

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any:
        raise AssertionError("there is no text")

    def decode(self, token_ids: Any) -> str:
        raise AssertionError("there is no text")


IDS = Ids()
#: Lengths of parts by file; an id is of one part in all files.
PARTS: dict[str, dict[int, int]] = {
    "1_sys_prompt.jsonl": {10: 8, 11: 2, 12: 3},
    "2_passages.jsonl": {0: 20, 1: 30, 2: 40},
    "3_history.jsonl": {20: 5, 21: 6},
    "4_user_input.jsonl": {30: 4, 31: 7},
    "5_web_search.jsonl": {40: 16},
}
KEYS = ("sys_prompt_id", "passage_id", "history_id", "user_input_id", "web_search_id")


def request(time: int, session: str, **parts: list[int]) -> dict[str, Any]:
    known = {"sys_prompt": [10], "passages_ids": [], "history": [], "web_search": []}
    return {
        "timestamp": str(time),
        "input_length": 99,
        "output_length": 5,
        "hash_ids": known | {"user_input": [30]} | parts,
        "session_id": session,
    }


TRACED = [
    request(100, "b", sys_prompt=[10, 11], passages_ids=[0, 1], history=[20]),
    request(90, "a", passages_ids=[1, 0], web_search=[40]),
    request(130, "b", passages_ids=[1, 1], history=[20, 21], user_input=[31]),
    request(140, "c", passages_ids=[2]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for key, (name, parts) in zip(KEYS, PARTS.items(), strict=True):
        lines = [json.dumps({key: part, "token_length": size}) for part, size in parts.items()]
        (tmp_path / name).write_text("\n".join(lines) + "\n\n")
    write(tmp_path, *TRACED)
    return tmp_path


def write(folder: Path, *requests: dict[str, Any]) -> None:
    (folder / TRACE).write_text("".join(json.dumps(line) + "\n" for line in requests))


def replay(**changes: Any) -> TraceReplay:
    return TraceReplay(**{"requests": 10} | changes)


def test_requests_arrive_in_order_with_their_sessions(folder: Path) -> None:
    found = read_trace(folder, replay(), IDS).stream
    assert found.arrivals == (0.0, 10.0, 40.0, 50.0)
    assert found.users == (0, 1, 1, 2)
    assert [sample.id for sample in found.samples] == ["r0", "r1", "r2", "r3"]
    assert {sample.dataset for sample in found.samples} == {SYNTHETIC}
    assert found.samples[0].source == f"{folder / TRACE}:2"


def test_speed_divides_the_gaps(folder: Path) -> None:
    assert read_trace(folder, replay(speed=10.0), IDS).stream.arrivals == (0.0, 1.0, 4.0, 5.0)


def test_passages_are_chunks_and_all_else_is_text(folder: Path) -> None:
    samples = read_trace(folder, replay(), IDS).stream.samples
    shapes = [[(s.kind, len(s.tokens)) for s in sample.segments] for sample in samples]
    assert shapes == [
        [("text", 8), ("chunk", 30), ("chunk", 20), ("chunk", 16), ("text", 4)],
        [("text", 10), ("chunk", 20), ("chunk", 30), ("text", 9)],
        [("text", 8), ("chunk", 30), ("chunk", 30), ("text", 18)],
        [("text", 8), ("chunk", 40), ("text", 4)],
    ]
    assert [sample.max_tokens for sample in samples] == [5, 5, 5, 5]


def test_a_part_is_the_same_tokens_wherever_it_occurs(folder: Path) -> None:
    first, second, third, _ = read_trace(folder, replay(), IDS).stream.samples
    assert first.chunks[:2] == second.chunks[::-1]
    assert third.chunks == (first.chunks[0],) * 2
    assert first.tokens[:8] == second.tokens[:8]
    assert third.segments[-1].tokens[:5] == second.segments[-1].tokens[:5]
    assert set(first.tokens) <= set(range(100, 200))
    assert len({chunk.tokens for chunk in first.chunks}) == 3


def test_reuse_is_what_the_trace_says(folder: Path) -> None:
    facts = measure(read_trace(folder, replay(), IDS).stream)
    chunks = 30 + 20 + 16 + 20 + 30 + 30 + 30 + 40
    assert facts.reuse == pytest.approx(1 - (30 + 20 + 16 + 40) / chunks)
    assert (facts.requests, facts.users, facts.unique_chunks) == (4, 3, 4)


def test_the_rate_is_that_of_the_gaps(folder: Path) -> None:
    stream = read_trace(folder, replay(), IDS).stream
    gaps = [b - a for a, b in pairwise(stream.arrivals or ())]
    assert measure(stream).rate == pytest.approx(len(gaps) / sum(gaps))


def test_the_same_seed_makes_the_same_tokens(folder: Path) -> None:
    assert read_trace(folder, replay(), IDS) == read_trace(folder, replay(), IDS)
    other = read_trace(folder, replay(seed=1), IDS).stream
    assert other.samples[0].tokens != read_trace(folder, replay(), IDS).stream.samples[0].tokens


def test_long_requests_are_left_out_and_counted(folder: Path) -> None:
    found = read_trace(folder, replay(longest=74), IDS)
    assert found.left_out == 2
    assert [sample.prompt_tokens + 5 for sample in found.stream.samples] == [74, 57]
    with pytest.raises(ConfigError, match="all 4 requests have more tokens than `longest`"):
        read_trace(folder, replay(longest=3), IDS)


def test_the_first_requests_are_taken_and_replies_shortened(folder: Path) -> None:
    found = read_trace(folder, replay(requests=2, max_tokens=3), IDS).stream
    assert [sample.max_tokens for sample in found.samples] == [3, 3]
    assert found.arrivals == (0.0, 10.0)


@pytest.mark.parametrize(
    "values",
    [
        {"requests": 0},
        {"longest": 0},
        {"max_tokens": 0},
        {"speed": 0.0},
        {"speed": float("nan")},
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(values))}`"):
        replay(**values)


@pytest.mark.parametrize("name", [TRACE, *LENGTHS])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"no {name} in it"):
        read_trace(folder, replay(), IDS)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (request(1, "a", passages_ids=[77]), "part 77 has no length"),
        ({"timestamp": "soon"}, "'timestamp'"),
        (request(1, "a") | {"output_length": 0}, "'output_length'"),
    ],
)
def test_a_malformed_line_is_named(line: dict[str, Any], named: str, folder: Path) -> None:
    write(folder, TRACED[0], line)
    with pytest.raises(DataError, match=named) as caught:
        read_trace(folder, replay(longest=1000), IDS)
    assert f"{TRACE}:2: " in caught.value.message
