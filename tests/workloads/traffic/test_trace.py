"""Traces of each kind, and what is said about malformed ones."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.algorithms import parse
from picbench.errors import ConfigError, DataError
from picbench.profile.reuse import ArmSimulation
from picbench.workloads.traffic.trace import Encode, Trace
from picbench.workloads.traffic.trace_file import read_trace_file

#: Mooncake's FAST25 conversation trace (Apache-2.0), beside the repository.
DATA = Path(os.environ.get("PICBENCH_DATA", Path(__file__).parents[4] / "shared" / "data"))
PUBLISHED = DATA / "traces" / "mooncake_conversation_trace.jsonl.gz"


def encode() -> Encode:
    """A BOS, then a token for each character."""
    return lambda text: (1, *map(ord, text))


def no_tokenizer() -> Encode:
    raise AssertionError("nothing has to be tokenized")


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_names_and_lengths_need_no_tokenizer(tmp_path: Path) -> None:
    lines = [
        {"arrival": 0, "parts": [{"id": "head", "tokens": 20}, {"chunk": "a", "tokens": 30}]},
        {"arrival": 0.5, "output": 7, "parts": [{"chunk": "a"}, {"tokens": 5}]},
    ]
    trace = read_trace_file(written(tmp_path / "t.jsonl", lines), no_tokenizer)
    first, second = trace.requests
    assert not trace.exact
    assert (first.arrival, second.arrival, first.output, second.output) == (0, 0.5, 16, 7)
    assert [(s.length, s.chunk) for s in first.segments] == [(20, False), (30, True)]
    assert second.segments[0] == first.segments[1]
    assert second.segments[1].content is None


def test_texts_are_tokenized_and_begin_once(tmp_path: Path) -> None:
    lines = [
        {"parts": [{"text": "ab"}, {"chunk": "x", "text": "cd"}, {"text": "e"}]},
        {"parts": [{"chunk": "x"}, {"tokens": 3}], "reply": {"tokens": [5, 6]}},
        {"parts": [{"chunk": "x", "text": "cd"}, {"text": "e"}]},
    ]
    trace = read_trace_file(written(tmp_path / "t.jsonl", lines), encode)
    first, second, third = trace.requests
    assert trace.exact
    assert [s.length for s in first.segments] == [1, 2, 2, 1]
    # A chunk is the same where it begins a prompt: the BOS before it is text.
    for later in (second, third):
        assert [s.length for s in later.segments[:2]] == [1, 2]
        assert later.segments[0] == first.segments[0]
        assert later.segments[1] == first.segments[2]
    assert second.reply is not None
    assert second.reply.length == 2


def test_a_request_file_has_its_tokens(tmp_path: Path) -> None:
    header = {"format": "picbench-requests", "version": 1, "dataset": "x", "synthetic": True}
    lines = [
        header,
        {"chunk": "c0", "text": "", "tokens": [5, 6], "preload": False},
        {"request": "r0", "max_tokens": 3, "parts": [{"chunk": "c0"}, {"tokens": [7]}]},
    ]
    trace = read_trace_file(written(tmp_path / "t.jsonl", lines), no_tokenizer)
    [request] = trace.requests
    assert (trace.kind, trace.exact) == ("picbench traffic", True)
    assert [(s.length, s.chunk) for s in request.segments] == [(2, True), (1, False)]


def test_ragpulse_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    lengths = {
        "1_sys_prompt": ("sys_prompt_id", {1: 20}),
        "2_passages": ("passage_id", {2: 30, 3: 40}),
        "3_history": ("history_id", {4: 50}),
        "4_user_input": ("user_input_id", {5: 6, 6: 7}),
        "5_web_search": ("web_search_id", {7: 8}),
    }
    for name, (field, values) in lengths.items():
        lines = [{field: number, "token_length": length} for number, length in values.items()]
        written(tmp_path / f"{name}.jsonl", lines)
    requests = [(30, [3, 2], 6), (10, [2], 5)]
    written(
        tmp_path / "0_trace.jsonl",
        [
            {
                "timestamp": time,
                "output_length": 9,
                "hash_ids": {"sys_prompt_id": [1], "passages_ids": passages, "user": [question]},
                "session_id": "s",
            }
            for time, passages, question in requests
        ],
    )
    first, second = read_trace_file(tmp_path, no_tokenizer).requests
    assert (first.arrival, second.arrival) == (0, 20)
    assert [(s.length, s.chunk) for s in second.segments] == [
        (20, False),
        (40, True),
        (30, True),
        (7, False),
    ]
    assert first.segments[:2] == (second.segments[0], second.segments[2])


#: By hand: the second prompt has 512 + 512 tokens of the first, of which the last block is
#: computed; the third 512 and 32 of the 40 that follow; the fourth begins otherwise.
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]},
    {"timestamp": 500, "input_length": 552, "output_length": 1, "hash_ids": [0, 7]},
    {"timestamp": 900, "input_length": 552, "output_length": 1, "hash_ids": [0, 7]},
    {"timestamp": 999, "input_length": 520, "output_length": 1, "hash_ids": [8, 1000]},
]


def test_mooncakes_form_is_counted_to_the_token(tmp_path: Path) -> None:
    trace = opened(written(tmp_path / "t.jsonl", MOONCAKE))
    arm = ArmSimulation(parse("prefix"), exact=trace.exact)
    requests = list(trace.requests)
    assert [(r.prompt_tokens, r.arrival, r.output) for r in requests][1] == (1024, 0.5, 2)
    reused = [found.reused for request in requests if (found := arm.serve(request))]
    assert reused == [0, 1008, 512, 544, 0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hash_ids": [0]}, "2: field 'hash_ids': 1 ids, but 1024 tokens are 2 of up to 512"),
        ({"input_length": 1000}, "2: parts.1: field 'id': '1' has 488 tokens .* had 512"),
        ({"input_length": 10**12}, "2: field 'input_length': .* less"),
        ({"output_length": None}, "2: field 'output_length'"),
    ],
)
def test_errors_of_mooncakes_form_name_line_and_field(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    lines = [MOONCAKE[0], MOONCAKE[1] | changed]
    with pytest.raises(DataError, match=message):
        list(opened(written(tmp_path / "t.jsonl", lines)).requests)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the trace is not here")
def test_the_published_conversation_trace_is_counted_to_the_token() -> None:
    trace = opened(PUBLISHED)
    arm = ArmSimulation(parse("prefix"), exact=trace.exact)
    for request in trace.requests:
        arm.serve(request)
    assert (arm.totals.prompt, arm.totals.reused) == (144_793_823, 54_097_440)


def test_a_reply_says_how_many_tokens_were_generated(tmp_path: Path) -> None:
    prompt = [{"text": "ab"}]
    told = [{"parts": prompt, "reply": reply} for reply in ({"tokens": 250}, {"text": "cde"})]
    told.append(told[0] | {"output": 250})
    trace = read_trace_file(written(tmp_path / "t.jsonl", told), encode)
    assert [request.output for request in trace.requests] == [250, 3, 250]


GOOD = {"arrival": 2, "parts": [{"chunk": "a", "tokens": 30}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"parts": []}, "2: field 'parts'"),
        ({"parts": [{"tokens": 0}]}, "2: field 'parts.0.tokens.count': .* greater"),
        ({"parts": [{"tokens": 10**9}]}, "2: field 'parts.0.tokens.count': .* less"),
        ({"parts": [{"tokens": [3, -1]}]}, "2: field 'parts.0.tokens.ids.1': .* greater"),
        ({"parts": [{"tokens": [2**70]}]}, "2: field 'parts.0.tokens.ids.0': .* less"),
        ({"parts": [{"chunk": "b"}]}, "2: parts.0: field 'chunk': 'b' has no 'text'"),
        ({"parts": [{"chunk": "a", "tokens": 31}]}, "2: parts.0: .*'a' has 31 .* had 30 before"),
        ({"parts": [{"tokens": 5}], "arrival": 1}, "2: field 'arrival': 1.0 is earlier than 2.0"),
        ({"parts": [{"chunk": "a", "id": "a"}]}, "2: field 'parts.0': .*both names"),
        ({"parts": [{"tokens": 5}], "outputs": 4}, "2: field 'outputs'"),
        ("no object", "2: "),
        (GOOD | {"output": 3, "reply": {"tokens": 9}}, "2: field 'output': 3, but .* has 9 tokens"),
        (GOOD | {"reply": {"text": ""}}, "2: field 'reply': no tokens"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path / "t.jsonl", [GOOD, line])
    with pytest.raises(DataError, match=message):
        list(read_trace_file(path, encode).requests)


def test_texts_without_chunks_are_in_order_as_well(tmp_path: Path) -> None:
    lines = [{"arrival": time, "parts": [{"text": "Who?"}]} for time in (2, 1)]
    with pytest.raises(DataError, match=r"2: field 'arrival': 1\.0 is earlier than 2.0"):
        list(read_trace_file(written(tmp_path / "t.jsonl", lines), encode).requests)


def opened(path: Path) -> Trace:
    return read_trace_file(path, no_tokenizer)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        opened(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        opened(tmp_path / "empty.jsonl")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"1: Invalid JSON: recursion limit .* at column"):
        list(opened(tmp_path / "deep.jsonl").requests)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"no 0_trace\.jsonl"):
        list(opened(tmp_path / "folder").requests)


def test_a_name_has_one_content(tmp_path: Path) -> None:
    lines = [{"parts": [{"chunk": "a", "tokens": ids}]} for ids in ([1, 2], [1, 2], [1, 3])]
    requests = opened(written(tmp_path / "t.jsonl", lines)).requests
    assert next(requests).segments == next(requests).segments
    with pytest.raises(DataError, match=r"3: parts\.0: field 'chunk': 'a' has other tokens here"):
        next(requests)


def test_a_trace_may_be_compressed(tmp_path: Path) -> None:
    packed = gzip.compress((json.dumps(GOOD) + "\n").encode())
    (tmp_path / "t.jsonl.gz").write_bytes(packed)
    [request] = opened(tmp_path / "t.jsonl.gz").requests
    assert request.prompt_tokens == 30
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-9])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz: cannot be read"):
        opened(tmp_path / "cut.jsonl.gz")
