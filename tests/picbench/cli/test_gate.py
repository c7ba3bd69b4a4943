"""`picbench gate` and `picbench baseline`, over runs of fake engines: formats and exit codes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from click.testing import Result as Done
from harness_fakes import FakeEngine, ForgetfulEngine, Harness, InterruptedEngine, make_sample

from picbench.cli import main

ARMS = ("full", "mepic")


def run(output: Path, *flags: str, mepic: FakeEngine | None = None, fails: bool = False) -> str:
    engines = {"mepic": mepic} if mepic else {}
    harness = Harness([make_sample(n) for n in range(20)], weights="real", engines=engines)
    given = ("--dataset", "fake", "--data", "d", "--output", str(output))
    algorithms = flags or ("--algo", ",".join(ARMS))
    done = CliRunner().invoke(main, ("run", "--only", *given, *algorithms), obj=harness.services())
    assert fails or done.exit_code == 0, done.stderr
    return str(output)


def invoke(*arguments: str) -> Done:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    done = invoke("baseline", "save", run(tmp_path / "old"), "musique")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "baselines/musique.json\n"
    return "musique"


def test_the_same_again_is_exit_0(baseline: str, tmp_path: Path) -> None:
    done = invoke("gate", run(tmp_path / "new"), "--baseline", baseline, "--strict")
    assert done.exit_code == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith("against musique: 34 ok")


def test_a_regression_is_exit_1(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new", mepic=FakeEngine("mepic", reused=0))
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 1
    assert "REGRESSION mepic computed_tokens: 320 before, 640 now" in done.stdout
    assert "REGRESSION mepic reused_tokens" in done.stdout
    assert "full" not in done.stdout.split("against")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--baseline"),
        (("--baseline", "musik"), "did you mean 'musique'"),
        (("--baseline", "absent/b.json"), "--baseline absent/b.json: No such file"),
        (("--baseline", "musique", "--format", "html"), "--format"),
    ],
)
def test_wrong_usage_is_exit_2(
    baseline: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = invoke("gate", str(tmp_path / "old"), *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("full,mepic", "--concurrency", "2"), "config.concurrency is 4 and 2"),
        (("full",), "lacks the arms mepic"),
    ],
)
def test_another_workload_is_exit_3(
    baseline: str, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = invoke("gate", run(tmp_path / "new", "--algo", *flags), "--baseline", baseline)
    assert done.exit_code == 3
    assert message in done.stderr


def test_other_scores_than_the_baselines_are_exit_3(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new")
    summary = tmp_path / "new" / "summary.json"
    text = summary.read_text()
    summary.write_text(text.replace('"metric": "f1"', '"metric": "em"'))
    for command in (("gate", new, "--baseline", baseline), ("compare", "old", new)):
        done = invoke(*command)
        assert done.exit_code == 3
        assert "metric is f1 and em" in done.stderr
    assert invoke("baseline", "save", "old", new, "both").exit_code == 3


def test_an_arm_that_the_baseline_lacks_is_said(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new", "--algo", "full,mepic,naive")
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 0, done.stderr
    assert "Not checked, as the baseline has no such arm: naive." in done.stdout


def test_runs_of_different_workloads_are_no_baseline(baseline: str, tmp_path: Path) -> None:
    other = run(tmp_path / "other", "--algo", "full,mepic", "--concurrency", "2")
    done = invoke("baseline", "save", "old", other, "two")
    assert done.exit_code == 3
    assert "(save runs of one workload under one name)" in done.stderr


def test_an_interrupted_run_is_exit_3(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new", mepic=InterruptedEngine("mepic"), fails=True)
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 3
    assert "is interrupted" in done.stderr
    assert invoke("baseline", "save", new, "other").exit_code == 3


def test_a_run_that_lacks_rows_is_exit_3(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new")
    rows = (tmp_path / "new/samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "new/samples.jsonl").write_bytes(b"".join(rows[:-3]))
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 3
    assert "rows of" in done.stderr
    assert "and measured 20" in done.stderr
    assert done.stderr.count("\n") == 1
    assert invoke("compare", str(tmp_path / "old"), new).exit_code == 3
    (tmp_path / "new/samples.jsonl").write_bytes(b"".join([*rows, rows[0]]))
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 3
    assert "has 21 rows of full, and measured 20" in done.stderr
    (tmp_path / "new/samples.jsonl").write_bytes(b"".join(rows).replace(b'"mepic"', b'"other"'))
    assert "measured 0" in invoke("report", new).stderr


def test_a_score_that_is_no_number_is_exit_2(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new")
    rows = (tmp_path / "new/samples.jsonl").read_text("utf-8")
    (tmp_path / "new/samples.jsonl").write_text(rows.replace('"score": 1.0', '"score": NaN', 1))
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 2
    assert "samples.jsonl: cannot be read: line 1 is no JSON" in done.stderr


def test_what_the_baseline_has_none_of_is_said(baseline: str, tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "--algo", "mepic")
    assert invoke("baseline", "save", alone, "alone").exit_code == 0
    done = invoke("gate", alone, "--baseline", "alone")
    assert done.exit_code == 0
    note = "Not checked, as the baseline has none: ttft_vs_full, tpot_vs_full."
    assert note in done.stdout
    assert (
        "as the baseline has none"
        not in invoke("gate", str(tmp_path / "old"), "--baseline", baseline).stdout
    )


def test_inconclusive_is_exit_5_if_strict_and_else_0(baseline: str, tmp_path: Path) -> None:
    file = tmp_path / "baselines" / "musique.json"
    saved = json.loads(file.read_text())
    saved["conditions"]["hardware"]["provenance.cpu.model"] = "another"
    file.write_text(json.dumps(saved))
    done = invoke("gate", str(tmp_path / "old"), "--baseline", baseline)
    assert done.exit_code == 0
    assert "INCONCLUSIVE mepic ttft_ms" in done.stdout
    assert invoke("gate", str(tmp_path / "old"), "--baseline", baseline, "--strict").exit_code == 5


def test_a_loss_beyond_the_margin_never_passes(baseline: str, tmp_path: Path) -> None:
    """One lost answer of 20 is 5 points, and may be chance."""
    new = run(tmp_path / "new", mepic=ForgetfulEngine("mepic"))
    done = invoke("gate", new, "--baseline", baseline)
    assert done.exit_code == 5
    assert "INCONCLUSIVE mepic score: 1.0000 before, 0.9500 now" in done.stdout
    annotated = invoke("gate", new, "--baseline", baseline, "--format", "github").stdout
    assert "::error title=mepic score::" in annotated


def test_json_has_every_check(baseline: str, tmp_path: Path) -> None:
    new = run(tmp_path / "new", mepic=FakeEngine("mepic", reused=0))
    done = invoke("gate", new, "--baseline", baseline, "--format", "json")
    document = json.loads(done.stdout)
    assert document["verdict"] == "regression"
    assert {c["verdict"] for c in document["checks"]} == {"ok", "regression"}
    fields = {"arm", "metric", "verdict", "before", "after", "message", "beyond"}
    assert set(document["checks"][0]) == fields


@pytest.mark.parametrize(
    ("mepic", "tag", "named"),
    [
        (FakeEngine("mepic", reused=0), "failure", ["computed_tokens", "reused_tokens"]),
        (ForgetfulEngine("mepic"), "failure", ["score"]),
    ],
)
def test_junit_has_a_case_for_each_check(
    baseline: str, tmp_path: Path, mepic: FakeEngine, tag: str, named: list[str]
) -> None:
    new = run(tmp_path / "new", mepic=mepic)
    done = invoke("gate", new, "--baseline", baseline, "--format", "junit")
    suite = ElementTree.fromstring(done.stdout)
    cases = list(suite.iter("testcase"))
    found = [
        (case.get("classname"), case.get("name")) for case in cases if case.find(tag) is not None
    ]
    assert found == [("mepic", name) for name in named]
    counts = {"failure": suite.get("failures"), "skipped": suite.get("skipped")}
    assert counts == {"failure": "0", "skipped": "0"} | {tag: str(len(named))}
    assert int(suite.get("tests", 0)) == len(cases)


def test_drift_is_unknown_from_one_run_alone(baseline: str, tmp_path: Path) -> None:
    again, new = run(tmp_path / "again"), run(tmp_path / "new")
    note = "The baseline is from one run"
    assert note in invoke("gate", new, "--baseline", baseline).stdout
    assert invoke("baseline", "save", str(tmp_path / "old"), again, "two").exit_code == 0
    assert note not in invoke("gate", new, "--baseline", "two").stdout


def test_github_gets_annotations_and_a_summary(
    baseline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    new = run(tmp_path / "new", mepic=FakeEngine("mepic", reused=0))
    done = invoke("gate", new, "--baseline", baseline, "--format", "github")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].startswith("::error title=mepic computed_tokens::320 before")
    lines = summary.read_text().splitlines()
    assert lines[0].startswith("## ")
    assert lines[4].startswith("| regression | mepic |")


def test_baselines_are_listed(baseline: str) -> None:
    done = invoke("baseline", "list")
    assert done.exit_code == 0
    assert done.stdout.startswith("musique  20")
    assert done.stdout.endswith("fake, 20 samples, full, mepic, runs: 1\n")


def test_a_baseline_that_cannot_be_read_hides_no_other(baseline: str, tmp_path: Path) -> None:
    (tmp_path / "baselines" / "a.json").write_text("{")
    (tmp_path / "baselines" / "b.json").write_text('{"baseline": 99}')
    done = invoke("baseline", "list")
    assert done.exit_code == 3
    assert done.stdout.startswith("musique  20")
    assert [line.partition(": ")[2][:23] for line in done.stderr.splitlines()] == [
        "`baseline` baselines/a.",
        "baselines/b.json has sc",
    ]


def test_several_runs_make_one_baseline(baseline: str, tmp_path: Path) -> None:
    runs = [str(tmp_path / "old"), run(tmp_path / "new", mepic=FakeEngine("mepic", reused=20))]
    assert invoke("baseline", "save", *runs, "two.yaml").exit_code == 0
    text = (tmp_path / "two.yaml").read_text()
    assert "\nruns: 2\n" in text
    thresholds = text.partition("thresholds:")[2].partition("conditions:")[0]
    assert "chunk_blocks" in thresholds
    assert "computed_tokens" not in thresholds, "the runs do not agree on it"


def test_edited_thresholds_survive_a_new_baseline(baseline: str, tmp_path: Path) -> None:
    file = tmp_path / "baselines" / "musique.json"
    file.write_text(file.read_text().replace('"margin": 0.01', '"margin": 0.2'))
    assert invoke("baseline", "save", str(tmp_path / "old"), baseline).exit_code == 0
    assert '"margin": 0.01' in file.read_text()
    file.write_text(file.read_text().replace('"margin": 0.01', '"margin": 0.2'))
    kept = invoke("baseline", "save", str(tmp_path / "old"), baseline, "--keep-thresholds")
    assert kept.exit_code == 0
    assert '"margin": 0.2' in file.read_text()
