"""A run directory comes back as it was written."""

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from harness_fakes import Harness, make_sample, make_snapshot, no_gpu
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.ledger import KINDS, Snapshot
from picbench.engines.request import Hits, TokenCounts
from picbench.errors import ConfigError, InvalidRun
from picbench.run.job import prepare
from picbench.run.schedule import Progress
from picbench.run.session import execute
from picbench.settings import parse_config
from picbench.store.reader import HELD, Run, read_run
from picbench.store.records import SampleRow
from picbench.store.writer import MANIFEST, MEMORY, SAMPLES, SCHEMA, SUMMARY, RunDirectory

#: Blocks of a kind: whole slots of them, so that sums are exact.
EXACT = st.integers(0, 16 * 50).map(lambda slots: slots / 16)


def row(sample: str, text: str = "yes") -> SampleRow:
    more = {"tokens": TokenCounts(9, reused=4), "hits": Hits(chunk=2, tiers={"host": 1})}
    row = SampleRow(arm="mepic", sample=sample, round=0, timed=True, prompt_sha256="0", text=text)
    return replace(row, **more)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write(MANIFEST, {"schema": SCHEMA, "status": "running"})
    return directory


def test_rows_come_back_as_they_were_written(directory: RunDirectory) -> None:
    written = [row("a"), row("b", "two\nlines, é, \u2028 and \ud800"), row("c")]
    directory.append(written[:2])
    directory.append(written[2:])
    assert read_run(directory.path).rows == written


@pytest.mark.parametrize("lost", [1, 2, 20])
def test_a_torn_last_line_costs_that_row_alone(directory: RunDirectory, lost: int) -> None:
    directory.append([row("a"), row("b")])
    file = directory.path / SAMPLES
    file.write_bytes(file.read_bytes()[:-lost])
    assert [r.sample for r in read_run(directory.path).rows] == ["a"]


def test_a_run_comes_back_whole(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(3)], arrivals=(0.0, 0.5, 1.0))
    values = {"algo": ("full", "mepic"), "dataset": "fake", "output": str(tmp_path / "run")}
    job = prepare(parse_config({**values, "slo": "ttft=500"}), harness.load, no_gpu)
    arms = execute(job, harness.launch, Progress(6, io.StringIO()))
    run = read_run(job.output)
    assert run.manifest["fingerprint"] == job.fingerprint
    assert run.summary == arms
    assert len(run.rows) == 6
    assert (
        run.ledger.groupby("arm")["referenced"].max()["mepic"]
        == run.summary["mepic"].blocks.peak_referenced
    )


def test_what_an_unfinished_run_lacks_is_named(directory: RunDirectory) -> None:
    run = read_run(directory.path)
    for name, file in (("rows", SAMPLES), ("summary", SUMMARY), ("ledger", MEMORY)):
        with pytest.raises(ConfigError, match=f"run: the run has no {file}"):
            getattr(run, name)


def test_what_is_no_run_directory_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run directory: no manifest\.json"):
        read_run(tmp_path)
    (tmp_path / "file").touch()
    for name, lacks in (("nothing", "no such directory"), ("file", "it is a file")):
        with pytest.raises(ConfigError, match=f"{name}: not a run directory: {lacks}"):
            read_run(tmp_path / name)


@pytest.mark.parametrize("text", ["", "[]", '"text"', "{}", json.dumps({"schema": SCHEMA})])
def test_another_manifest_is_a_plain_error(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json: cannot be read: [A-Za-z]"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "name", "content"),
    [
        (SAMPLES, "rows", json.dumps(asdict(row("a")) | {"colour": 1}) + "\n"),
        (SAMPLES, "rows", '{"arm": "full"}\n'),
        (SUMMARY, "summary", '{"arms": {"full": {"requests": 1}}}'),
        (SUMMARY, "summary", "{}"),
        (MEMORY, "ledger", "{}"),
    ],
)
def test_other_contents_are_plain_errors(
    directory: RunDirectory, file: str, name: str, content: str
) -> None:
    (directory.path / file).write_text(content)
    with pytest.raises(ConfigError, match=f"run/{file}: cannot be read: [A-Za-z]"):
        getattr(read_run(directory.path), name)


@pytest.mark.parametrize(
    ("field", "value"), [("score", "high"), ("score", 2.0), ("score", -0.1), ("ttft_ms", -5.0)]
)
def test_a_value_that_cannot_be_is_named(
    directory: RunDirectory, field: str, value: object
) -> None:
    """Comparisons and reports ended as bugs in their arithmetic."""
    directory.append([row("a"), row("b")])
    path = directory.path / SAMPLES
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in (first, {**second, field: value})))
    with pytest.raises(ConfigError, match=f"cannot be read: line 2: {field}: Input should be"):
        read_run(directory.path).rows  # noqa: B018
    path.write_text(f"{json.dumps(first)}\ngarbage\n")
    with pytest.raises(ConfigError, match=r"samples\.jsonl: cannot be read: line 2 is no JSON"):
        read_run(directory.path).rows  # noqa: B018


GOLDEN = Path(__file__).parent / "golden" / str(SCHEMA)

#: What the golden run measured: (arm, sample, error, tokens reused, score).
ROWS = [
    ("full", "s0", None, 0, 1.0),
    ("mepic", "s0", None, 16, 1.0),
    ("mepic", "s1", "a chunk is too long (`context`)", 0, None),
    ("full", "s1", "a chunk is too long (`context`)", 0, None),
    ("full", "s2", None, 0, 1.0),
    ("mepic", "s2", None, 16, 1.0),
]


def test_golden_rows() -> None:
    run = read_run(GOLDEN)
    found = [(r.arm, r.sample, r.error, r.tokens.reused, r.score) for r in run.rows]
    assert found == ROWS
    assert [row.outcome for row in run.rows if row.error] == ["error"] * 2
    assert [row.cluster for row in run.rows] == ["s0", "s0", "s1", "s1", "s2", "s2"]
    assert [segment.text for segment in run.workload["s2"].segments] == ["t", "c", "d", "q"]


def test_golden_summary_and_manifest() -> None:
    run = read_run(GOLDEN)
    assert list(run.summary) == ["full", "mepic"]
    mepic = run.summary["mepic"]
    assert (mepic.requests, mepic.failed, mepic.score.mean) == (3, 1, 1.0)
    assert (mepic.tokens.reused, mepic.blocks.peak_referenced) == (32, 20)
    assert mepic.ttft_vs_full is not None
    assert mepic.ttft_vs_full.geomean == pytest.approx(0.25)
    counts = {"answered": 2, "abstained": 0, "unparsed": 0, "error": 1}
    assert run.summary["full"].outcomes == counts
    assert (run.manifest["schema"], run.manifest["status"]) == (SCHEMA, "partial")
    assert [attempt["status"] for attempt in run.manifest["attempts"]] == ["partial"]
    assert run.manifest["model"]["restates"] is False


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA + 1])
@pytest.mark.parametrize("file", [MANIFEST, SUMMARY])
def test_an_unknown_schema_is_refused_with_advice(tmp_path: Path, file: str, version: int) -> None:
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    document = json.loads((copy / file).read_text()) | {"schema": version}
    (copy / file).write_text(json.dumps(document))
    refused = f"schema {version}; this picbench reads {SCHEMA}"
    with pytest.raises(InvalidRun, match=refused) as caught:
        read_run(copy).summary  # noqa: B018
    assert "repeat the run" in caught.value.hint
    assert caught.value.exit_code == 3


def test_series_are_what_the_run_wrote(tmp_path: Path) -> None:
    snapshots = [make_snapshot(0, 0.0, 10), make_snapshot(1, 0.5, 25), make_snapshot(2, 1.0, 5)]
    RunDirectory(tmp_path).write_memory({"mepic": snapshots, "full": snapshots[:1]})
    ledger = Run(tmp_path, {"status": "complete"}).ledger
    assert ledger["arm"].tolist() == ["mepic"] * 3 + ["full"]
    assert ledger["time"].tolist() == [0.0, 0.5, 1.0, 0.0]
    assert ledger["referenced"].tolist() == [10, 25, 5, 10]


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(HELD, EXACT)), min_size=1, max_size=9))
def test_kinds_at_the_peak_sum_to_the_peak_exactly(steps: list[dict[str, float]]) -> None:
    pool = 16 * 50 * len(HELD)
    nothing = dict.fromkeys(KINDS, 0.0)
    snapshots = []
    for i, step in enumerate(steps):
        blocks = nothing | step | {"free": pool - sum(step.values())}
        snapshots.append(Snapshot(i, float(i), pool, blocks))
    with TemporaryDirectory() as folder:
        RunDirectory(Path(folder)).write_memory({"mepic": snapshots})
        ledger = Run(Path(folder), {"status": "complete"}).ledger
    peak = ledger.loc[ledger["referenced"].idxmax()]
    most = max(sum(step.values()) for step in steps)
    assert peak[list(HELD)].sum() == peak["referenced"] == most
