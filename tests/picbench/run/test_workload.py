"""From flags to a workload, with real rows, tokenizer and documents."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import no_gpu

from picbench.cli.run import print_plan
from picbench.errors import ConfigError, DataError
from picbench.run.job import Job, prepare
from picbench.run.result import print_result
from picbench.run.session import about
from picbench.run.workload import load_workload
from picbench.settings import parse_config

ROW = {
    "input": "Where?",
    "context": "Passage 1:\nAda lived in Oslo.\nPassage 2:\nOslo lies in Norway.",
    "answers": ["Norway"],
}

MakeJob = Callable[..., Job]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROW | {"_id": "a"}), "{", json.dumps(ROW | {"_id": "b"}), "{}"]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def make_job(rows: Path) -> MakeJob:
    def make(**flags: Any) -> Job:
        values = {"algo": ("full",), "dataset": "musique", "data": str(rows), "on_bad_row": "skip"}
        return prepare(parse_config(values | flags), load_workload, no_gpu)

    return make


def printed(job: Job) -> str:
    stream = io.StringIO()
    print_plan(job, stream)
    print_result(job, {}, stream)
    return stream.getvalue()


def test_documents_are_for_arms_that_want_them(tmp_path: Path) -> None:
    """Without one, requests and the fingerprint of the run are those without documents."""
    context = "Passage 1:\nOslo\nIt is old.\nPassage 2:\nOslo\nIt burned."
    file = tmp_path / "rows.jsonl"
    row = ROW | {"context": context, "gold_passages": [1]}
    file.write_text(json.dumps(row | {"documents": [0, 0]}))
    flags = {"dataset": "musique", "data": str(file)}
    plain, known, dropped = (
        prepare(parse_config(flags | more), load_workload, no_gpu)
        for more in (
            {"algo": ("naive",)},
            {"algo": ("naive,mepic:context=document",)},
            {"algo": ("naive:context=document",), "drop": "lead"},
        )
    )
    contexts = [[c.context for c in j.workload.samples[0].chunks] for j in (plain, known, dropped)]
    lead = known.workload.samples[0].chunks[0].tokens
    assert contexts == [[(), ()], [(), lead], [lead]]
    assert plain.facts.fingerprint != known.facts.fingerprint
    assert "full does not know them either" not in printed(known)
    assert "full does not know them either" in printed(dropped)
    said = "the rows do not say where in its document any chunk stands"
    assert said not in printed(known)
    file.write_text(json.dumps(row))
    config = parse_config(flags | {"algo": ("naive:context=document",)})
    unknown = prepare(config, load_workload, no_gpu)
    assert unknown.facts.fingerprint == plain.facts.fingerprint
    assert said in printed(unknown)


@pytest.mark.parametrize(
    ("tokens", "context", "said"),
    [
        (5000, None, "5004 tokens of prompt and reply, a context of 4096"),
        (1, 4097, "`context` 4097: testbed has a context of 4096"),
    ],
)
def test_requests_that_no_context_holds_are_refused_before_they_are_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, context: int | None, said: str
) -> None:
    """A text of 12 million tokens took the tokenizer 88 s and 5.6 GB."""
    path = tmp_path / "requests.jsonl"
    head = {"format": "picbench-requests", "version": 1, "dataset": "musique", "synthetic": True}
    line = {"request": "r0", "max_tokens": 4, "parts": [{"text": "a", "tokens": [1] * tokens}]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, line)))
    monkeypatch.setattr("picbench.workloads.models.load_tokenizer", lambda model: pytest.fail())
    config = parse_config({"algo": ("full",), "requests": str(path), "context": context})
    with pytest.raises(ConfigError, match=said):
        load_workload(config)


def test_skipped_rows_are_counted_and_said_in_one_line_each_time(
    make_job: MakeJob, rows: Path
) -> None:
    job = make_job()
    workload = about(job, {})["workload"]
    assert (workload.samples, workload.skipped_rows) == (2, 2)
    assert workload.first_skipped.startswith(f"{rows}:2: ")
    text = " ".join(printed(job).split())
    assert text.count("malformed rows left out: 2, the first: ") == 2
    rows.write_text(json.dumps(ROW), encoding="utf-8")
    job = make_job(on_bad_row="stop")
    assert "malformed" not in printed(job)
    workload = about(job, {})["workload"]
    assert (workload.skipped_rows, workload.first_skipped) == (0, None)
    assert (workload.origin, workload.chat) == (None, False)


def test_the_testbed_has_no_chat_template(make_job: MakeJob) -> None:
    assert not make_job(chat="auto").workload.chat
    with pytest.raises(ConfigError, match="`chat=on`"):
        make_job(chat="on")


def test_scoring_names_its_metric_and_changes_the_fingerprint(make_job: MakeJob) -> None:
    plain, other = make_job(), make_job(scoring="cacheblend")
    assert (plain.workload.metric, other.workload.metric) == ("f1", "f1 (CacheBlend)")
    assert plain.facts.fingerprint == other.facts.fingerprint
    assert plain.fingerprint != other.fingerprint
    # The testbed model restates the question before it answers; only the answer is scored.
    assert other.workload.grader.score("home of Ada is Oslo", ["Oslo"]) == 1.0


def test_offline_changes_no_number(make_job: MakeJob) -> None:
    assert make_job(offline=True).fingerprint == make_job().fingerprint


def test_a_grid_needs_text_files(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`grid`"):
        make_job(grid="100-200:2x2")
    (tmp_path / "long.txt").write_text("The grass is dry. " * 200, encoding="utf-8")
    job = make_job(dataset="needle", data=str(tmp_path / "long.txt"), grid="100-200:2x3")
    assert job.facts.samples == 6


def test_rows_that_the_seed_makes_are_synthetic(make_job: MakeJob, tmp_path: Path) -> None:
    flags = {"dataset": "ruler:vt", "data": "bundled", "grid": "1500-1500:1x3", "algo": ("full",)}
    job, again, other = (make_job(**flags, seed=seed) for seed in (1, 1, 2))
    assert job.workload.synthetic and "ruler:vt (synthetic rows)" in printed(job)
    assert (job.workload.metric, len(job.workload.samples)) == ("string-match", 3)
    assert job.workload.samples == again.workload.samples
    assert job.workload.samples[0].tokens != other.workload.samples[0].tokens
    empty = {"data": str(tmp_path)}
    for wrong in (empty, {"grid": "1500-9000:2x2"}, {"columns": "squad"}):
        with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`"):
            make_job(**flags | wrong)


CHINESE = {"input": "?", "context": "\u5317\u4eac\u3002", "answers": ["\u5317\u4eac"]}


@pytest.mark.parametrize(
    ("answers", "scoring", "said"),
    [
        (["\u5317\u4eac"], "longbench", "answers in Chinese, which `scoring=longbench` cannot"),
        (["\u304a\u8336"], "longbench", "answers in Japanese or Thai"),
        (["\u304a\u8336"], "longbench-zh", "answers in Japanese or Thai"),
        (["\u304a\u8336"], "cacheblend", None),
        (["\u5317\u4eac", "Beijing"], "longbench", None),
    ],
)
def test_answers_without_spaces_are_not_scored_by_words_between_spaces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[str],
    scoring: str,
    said: str | None,
) -> None:
    monkeypatch.setattr("picbench.workloads.scoring.chinese", lambda metric: lambda *texts: 0.0)
    file = tmp_path / "qa.jsonl"
    bad = json.dumps(CHINESE | {"answers": answers, "_id": "one"})
    file.write_text(bad + "\n" + json.dumps(ROW | {"_id": "two"}) + "\n")
    config = {"algo": ("full",), "dataset": "qa", "data": str(file), "scoring": scoring}
    if said:
        with pytest.raises(DataError, match=f"qa.jsonl:1: {said}"):
            load_workload(parse_config(config))
    found = load_workload(parse_config(config | {"on_bad_row": "skip"}))
    assert [sample.id for sample in found.samples] == (["two"] if said else ["one", "two"])
    assert len(found.skipped) == bool(said)
    file.write_text(bad)
    if said:
        with pytest.raises(DataError, match="no row is left"):
            load_workload(parse_config(config | {"on_bad_row": "skip"}))


def test_requests_that_no_reply_answers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    head = {"format": "picbench-requests", "version": 1, "dataset": "musique", "synthetic": True}
    line = {"request": "r0", "max_tokens": 4, "parts": [{"tokens": [5, 6]}], "answers": ["The", ""]}
    path.write_text("".join(json.dumps(one) + "\n" for one in (head, line)))
    with pytest.raises(DataError, match=r"requests.jsonl:2: no reply can match 'The'"):
        load_workload(parse_config({"algo": ("full",), "requests": str(path)}))


def test_requests_that_are_too_long_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    texts = ("Who? " * 400, "Who?", "Where?")
    lines = [{"time": n, "prompt": text} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"algo": ("full",), "requests": str(path), "context": 200, "on_bad_row": "skip"}
    found = load_workload(parse_config(settings))
    assert [sample.source for sample in found.samples] == [f"{path}:2", f"{path}:3"]
    assert found.arrivals == (1, 2)
    assert len(found.skipped) == 1
    assert f"{path}:1" in found.skipped[0]
    assert (found.dataset, found.synthetic, found.samples[0].answers) == ("log", False, ())
    with pytest.raises(ConfigError, match=r"log\.jsonl:1: \d+ tokens .*=skip` leaves the row out"):
        load_workload(parse_config({**settings, "on_bad_row": "stop"}))
    one = load_workload(parse_config({**settings, "limit": 1}))
    assert [sample.source for sample in one.samples] == [f"{path}:2"]
