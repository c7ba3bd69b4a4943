"""`picbench compare`, over runs of fake engines: what it prints, and its exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness_fakes import FakeEngine, ForgetfulEngine, Harness, make_sample, run_fakes

from picbench.cli import main
from picbench.run.workload import Workload
from picbench.settings import RunConfig

ARMS = "full,naive,mepic"


class SyntheticHarness(Harness):
    """Its rows were generated."""

    def load(self, config: RunConfig) -> Workload:
        return replace(super().load(config), synthetic=True)


def run(
    output: Path,
    *flags: str,
    samples: int = 10,
    weights: str = "real",
    harness: type[Harness] = Harness,
) -> str:
    made = harness(
        [make_sample(n) for n in range(samples)],
        weights=weights,
        engines={"naive": FakeEngine("naive", reused=20)},
    )
    given = ("--dataset", "fake", "--data", "d", "--output", str(output), *flags)
    done = CliRunner().invoke(main, ("run", "--only", *given), obj=made.services())
    assert done.exit_code == 0, done.stderr
    return str(output)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("compare", *arguments))


@pytest.fixture
def one(tmp_path: Path) -> str:
    return run(tmp_path / "one", "--algo", ARMS)


@pytest.fixture
def two(tmp_path: Path) -> str:
    return run(tmp_path / "two", "--algo", ARMS)


def test_a_comparison_ends_with_what_follows_from_it(tmp_path: Path, one: str) -> None:
    *_, first, second = compare(one).stdout.splitlines()
    assert first.startswith("Verdict: ") and " against full: first token " in first
    assert "times sooner; no answer has another score." in second
    random = run(tmp_path / "random", "--algo", ARMS, weights="random")
    assert compare(random).stdout.endswith(" times sooner.\n")
    assert compare(one, "--format", "markdown").stdout.count("\n**Verdict: ") == 2


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [(9, "answers get worse (9 worse, 0 better of 12)"), (1, "get worse is open (1 worse, 0")],
)
def test_a_verdict_says_no_more_of_answers_than_is_known(
    tmp_path: Path, forgotten: int, said: str
) -> None:
    engine = ForgetfulEngine()
    engine.forgotten = forgotten
    made = Harness([make_sample(n) for n in range(12)], weights="real", engines={"mepic": engine})
    given = ("--dataset", "fake", "--data", "d", "--output", str(tmp_path / "run"))
    CliRunner().invoke(main, ("run", "--algo", "mepic", *given), obj=made.services())
    assert said in compare(str(tmp_path / "run")).stdout.splitlines()[-1]


def test_an_arm_with_other_prompts_leaves_the_others_to_be_compared(tmp_path: Path) -> None:
    given = run(tmp_path / "one", "--algo", ARMS)
    path = Path(given, "samples.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["arm"] == "naive":
            row["prompt_sha256"] = "0" * 64
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = compare(given)
    assert done.exit_code == 0, done.stderr
    assert "mepic" in done.stdout
    assert "naive: 10 of 10 samples have other prompts" in done.stdout


def test_arms_are_compared_with_those_of_the_same_name(one: str, two: str) -> None:
    done = compare(one, two)
    assert done.exit_code == 0, done.stderr
    for arm in ARMS.split(","):
        assert f"{arm} against {arm}: 10 samples" in done.stdout
    assert "0 of 10 answers have other tokens." in done.stdout
    assert done.stderr == ""


def test_a_p99_of_ten_requests_is_refused(one: str) -> None:
    done = compare(one, "--arms", "full,mepic")
    assert "n=10, needs 100" in done.stdout


def test_arms_of_one_run_are_compared_with_full(one: str) -> None:
    done = compare(one)
    assert "naive against full: 10 samples" in done.stdout
    assert "mepic against full: 10 samples" in done.stdout
    assert "0.250x" in done.stdout


def test_two_arms_can_be_named(one: str, two: str) -> None:
    document = json.loads(compare(one, "--arms", "naive,mepic", "--format", "json").stdout)
    assert [(arm["before"], arm["after"]) for arm in document["arms"]] == [("naive", "mepic")]
    counters = {c["name"]: c for c in document["arms"][0]["counters"]}
    assert counters["reused_tokens"]["before"] == 200
    assert counters["reused_tokens"]["after"] == 160
    assert counters["reused_tokens"]["samples"] == 10
    across = json.loads(compare(one, two, "--arms", "full,mepic", "--format", "json").stdout)
    assert across["before"] == one
    assert across["after"] == two


def test_p_is_adjusted_for_all_arms_and_metrics(one: str) -> None:
    assert "adjusted for 8 tests (Holm)" in compare(one).stdout
    assert "adjusted for 4 tests (Holm)" in compare(one, "--arms", "full,mepic").stdout


def test_a_margin_is_answered(one: str) -> None:
    open_yet = (
        "score on other documents: none differs, but a loss in 26% of samples may go unseen; "
        "about 299 samples would decide."
    )
    assert open_yet in compare(one, "--margin", "0.01").stdout
    small = "score on other documents: loses less than 0.3, with 95 % confidence."
    assert small in compare(one, "--margin", "0.3").stdout


def test_other_settings_are_refused_by_name(one: str, tmp_path: Path) -> None:
    other = run(tmp_path / "other", "--algo", ARMS, "--concurrency", "2")
    done = compare(one, other)
    assert done.exit_code == 3
    assert "config.concurrency is 4 and 2" in done.stderr
    assert "--allow-mismatch" in done.stderr
    assert done.stdout == ""
    allowed = compare(one, other, "--allow-mismatch")
    assert allowed.exit_code == 0
    assert "MISMATCH: config.concurrency is 4 and 2" in allowed.stdout


def test_other_requests_are_refused(one: str, tmp_path: Path) -> None:
    done = compare(one, run(tmp_path / "other", "--algo", ARMS, samples=9))
    assert done.exit_code == 3
    assert "workload.fingerprint" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "full"), "'--arms': 'full': not two names"),
        (("--arms", "full,mepik"), "no arm mepik (did you mean 'mepic'?)"),
        (("--margin", "2"), "--margin"),
        (("--format", "html"), "--format"),
    ],
)
def test_wrong_usage_is_exit_2(one: str, arguments: tuple[str, ...], message: str) -> None:
    done = compare(one, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_what_is_no_run_is_exit_2(tmp_path: Path) -> None:
    done = compare(str(tmp_path))
    assert done.exit_code == 2
    assert "not a run directory" in done.stderr


def test_random_weights_are_said(tmp_path: Path) -> None:
    path = run(tmp_path / "run", "--algo", ARMS, weights="random")
    assert "scores are not meaningful" in compare(path).stdout


@pytest.mark.parametrize("style", ["text", "markdown", "json"])
def test_synthetic_rows_are_said(tmp_path: Path, style: str) -> None:
    path = run(tmp_path / "run", "--algo", ARMS, harness=SyntheticHarness)
    said = " ".join(compare(path, "--format", style).stdout.split())
    assert "the rows are synthetic" in said


def test_it_is_said_how_intervals_are_made(one: str) -> None:
    said = " ".join(compare(one).stdout.split())
    assert "over up to 13 rounds by Student's t." in said


def test_quantiles_say_what_their_intervals_are_over(one: str, tmp_path: Path) -> None:
    repeated = run(tmp_path / "repeated", "--algo", ARMS, "--repeats", "3")
    once, more = (" ".join(compare(path).stdout.split()) for path in (one, repeated))
    assert "Intervals of quantiles: order statistics of the requests of one repeat;" in once
    assert "and Student's t over 3 repeats." in more
    assert "of one repeat" not in more


@pytest.mark.parametrize(
    ("repeats", "cell", "note"),
    [
        (1, "0.250, drift not included", "Drift not included: one arm served all requests,"),
        (2, "0.250, over 2 repeats", "Two repeats say little of others: more make these"),
        (3, "0.250, over 3 repeats", "as far as it differs from repeat to repeat."),
    ],
)
def test_arms_of_an_open_loop_say_what_of_drift_is_in_the_interval(
    tmp_path: Path, repeats: int, cell: str, note: str
) -> None:
    harness = Harness(
        [make_sample(n) for n in range(10)], weights="real", arrivals=tuple(map(float, range(10)))
    )
    path = run_fakes(harness, tmp_path / "open", *ARMS.split(","), repeats=repeats)
    lines = compare(str(path)).stdout
    assert sum(cell in line for line in lines.splitlines() if "ttft_ms" in line) == 2
    assert note in " ".join(lines.split())
    assert ("Two repeats" in lines) == (repeats == 2)


def test_arms_that_took_turns_say_nothing_of_drift(tmp_path: Path) -> None:
    turns = run(tmp_path / "turns", "--algo", ARMS, "--repeats", "2", "--concurrency", "1")
    said = compare(turns).stdout.lower()
    assert "drift" not in said
    assert "over 2 repeats;" in " ".join(said.split())


def test_markdown_has_a_table_for_each_arm(one: str) -> None:
    lines = compare(one, "--format", "markdown").stdout.splitlines()
    assert sum(line.startswith("| metric |") for line in lines) == 2
    assert lines[0].startswith("## ")


def test_github_gets_a_step_summary(
    one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = compare(one, "--format", "github")
    assert done.stdout == ""
    assert summary.read_text().startswith("before\n## ")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert compare(one, "--format", "github").stdout == summary.read_text().removeprefix("before\n")
