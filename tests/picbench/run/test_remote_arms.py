"""Runs with an arm that is a server elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from completion_server import CompletionServer, serving, vllm_metrics
from harness_fakes import Harness, InterruptedEngine, make_sample, no_gpu

from picbench.cli import main
from picbench.compare.arm import measured_arms
from picbench.figures.run import write_run_files
from picbench.run.job import prepare
from picbench.settings import parse_config
from picbench.store.reader import read_run
from picbench.store.records import ServerCounts


@pytest.fixture
def harness() -> Harness:
    return Harness([make_sample(n) for n in range(6)])


def run(harness: Harness, output: Path, *flags: str) -> Result:
    given = ("run", "--dataset", "fake", "--algo", "full,mepic", "--concurrency", "1")
    services = replace(harness.services(), files=write_run_files)
    return CliRunner().invoke(main, [*given, "--output", str(output), *flags], obj=services)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_server_elsewhere_is_an_arm_beside_the_others(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-secret")
    output = tmp_path / "run"
    with serving(CompletionServer()) as server:
        result = run(harness, output, "--arm", f"theirs={server.url}")
    assert result.exit_code == 0, result.stderr
    prompts = [list(sample.tokens) for sample in harness.samples]
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompts)

    found = read_run(output)
    rows = [row for row in found.rows if row.arm == "theirs"]
    assert {(row.score, row.tokens.reused, row.prefill_ms) for row in rows} == {(1.0, None, None)}
    ours = {row.sample: row.prompt_sha256 for row in found.rows if row.arm == "full"}
    assert {row.sample: row.prompt_sha256 for row in rows} == ours
    arm = found.summary["theirs"]
    assert (arm.tokens.reused, arm.computed_tokens, arm.output_tokens) == (None, None, 12)
    assert arm.ttft_vs_full is not None and arm.ttft_vs_full.pairs == 6
    assert read(output / "manifest.json")["arms"]["theirs"]["engine"]["url"] == server.url
    line = next(text for text in result.stdout.splitlines() if text.startswith("│ theirs"))
    assert [cell.strip() for cell in line.split("│")][-4:-1] == ["-", "-", "-"]
    files = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert not any(b"k-secret" in content for content in files)


def test_what_reads_runs_reads_one_with_a_server_elsewhere(
    harness: Harness, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with serving(CompletionServer()) as server:
        assert run(harness, output, "--arm", f"theirs={server.url}").exit_code == 0
    assert (output / "table.md").exists()
    arm = measured_arms(read_run(output))["theirs"]
    assert "reused_tokens" not in arm.counters and "peak_blocks" not in arm.totals
    assert arm.counters["output_tokens"] == (2,) * 6
    shown = CliRunner().invoke(main, ["show", str(output)])
    assert shown.exit_code == 0 and f"theirs={server.url}" in shown.output
    page = CliRunner().invoke(main, ["report", str(output), "--output", str(tmp_path / "r.html")])
    assert page.exit_code == 0, page.output


def test_counters_that_the_server_gives_are_kept(harness: Harness, tmp_path: Path) -> None:
    with serving(CompletionServer(cached=9)) as server:
        assert run(harness, tmp_path / "run", "--arm", f"theirs={server.url}").exit_code == 0
    arm = read_run(tmp_path / "run").summary["theirs"]
    assert (arm.tokens.reused, arm.computed_tokens) == (6 * 9, 6 * (36 - 9))


def test_what_the_server_counts_by_itself_is_kept_and_shown(
    harness: Harness, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with serving(CompletionServer(metrics=vllm_metrics)) as server:
        result = run(harness, output, "--arm", f"theirs={server.url}")
    assert result.exit_code == 0, result.stderr
    arm = read_run(output).summary["theirs"]
    assert arm.counted == ServerCounts(
        prompt_tokens=6 * 36,
        cached_tokens=6 * 9,
        queried_tokens=6 * 36,
        hit_tokens=6 * 8,
        external_hit_tokens=None,
        preemptions=6,
        peak_kv_usage=0.25,
    )
    lines = (output / "batches.jsonl").read_text().splitlines()
    batches = [json.loads(line) for line in lines]
    assert {b["counted"]["cached_tokens"] for b in batches if b["arm"] == "theirs"} == {9}
    assert {b["counted"] for b in batches if b["arm"] != "theirs"} == {None}
    table = next(line for line in result.stdout.splitlines() if line.startswith("│ theirs"))
    assert [cell.strip() for cell in table.split("│")][-3:-1] == ["25.0%", "-"]
    assert (
        "theirs: by its own counters 25.0% of prompt tokens came from its caches; 6 preemptions; "
        "at most 25% of its KV memory was seen in use"
    ) in " ".join(result.stdout.split())
    assert read(output / "manifest.json")["arms"]["theirs"]["engine"]["metrics"] is True
    frame = pd.read_csv(output / "table.csv").set_index("arm")
    assert frame["counted_cached_tokens"].dropna().to_dict() == {"theirs": 54}
    assert "| 25.0 |" in (output / "table.md").read_text()
    assert "serves others" not in result.stdout


def test_a_server_that_serves_others_meanwhile_is_told_of(harness: Harness, tmp_path: Path) -> None:
    def busy(server: CompletionServer) -> str:
        return f"vllm:prompt_tokens_total {100 * len(server.bodies)}.0\n"

    with serving(CompletionServer(metrics=busy)) as server:
        result = run(harness, tmp_path / "run", "--arm", f"theirs={server.url}")
    said = " ".join(result.stdout.split())
    assert "600 prompt tokens where 216 were sent: it serves others, too" in said


def test_a_simulated_arm_is_marked_from_the_manifest_to_the_figures(
    harness: Harness, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with serving(CompletionServer()) as server:
        result = run(harness, output, "--arm", f"sim={server.url},simulated=yes")
    assert result.exit_code == 0, result.stderr
    assert read(output / "manifest.json")["arms"]["sim"]["engine"]["provenance"] == "simulated"
    found = {name: arm["provenance"] for name, arm in read(output / "summary.json")["arms"].items()}
    assert found == {"full": "measured", "mepic": "measured", "sim": "simulated"}
    assert "│ sim (simulated) " in result.stdout and "full (simulated)" not in result.stdout
    last = json.loads(result.stdout.splitlines()[-1])
    assert {name: arm["provenance"] for name, arm in last["arms"].items()} == found
    table = (output / "table.md").read_text()
    assert "| sim (simulated) |" in table and "Simulated arms: no engine computed" in table
    assert pd.read_csv(output / "table.csv").set_index("arm")["provenance"].to_dict() == found
    for style in ("markdown", "latex"):
        shown = CliRunner().invoke(main, ["table", str(output), "--format", style])
        assert "sim (simulated)" in shown.stdout
    # A server elsewhere has no ledger, so that the figure of memory does not have it.
    for name in ("ttft", "accuracy"):
        figure = (output / f"{name}.svg").read_text()
        assert "sim (simulated)" in figure and ">full<" in figure
    page = tmp_path / "r.html"
    CliRunner().invoke(main, ["report", str(output), "--output", str(page)])
    assert page.read_text().count("sim: simulated") > 3
    assert "sim is simulated: no engine computed anything" in page.read_text()
    compared = CliRunner().invoke(main, ["compare", str(output), "--arms", "full,sim"])
    assert "the numbers of sim are simulated" in compared.stdout, compared.output


def test_failing_requests_are_failed_rows(harness: Harness, tmp_path: Path) -> None:
    with serving(CompletionServer(fails=lambda prompt: 1002 in prompt)) as server:
        result = run(harness, tmp_path / "run", "--arm", f"theirs={server.url}")
    assert result.exit_code == 4
    failed = [row for row in read_run(tmp_path / "run").rows if row.error is not None]
    assert [(row.arm, row.sample) for row in failed] == [("theirs", "s2")]


def test_a_server_that_is_not_there_stops_the_run_before_engines_start(
    harness: Harness, tmp_path: Path
) -> None:
    with serving(CompletionServer()) as gone:
        pass
    result = run(harness, tmp_path / "run", "--arm", f"theirs={gone.url}")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"picbench: --arm theirs: {gone.url} cannot be reached")
    assert harness.servers == {} and not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [("--cache", "cold"), ("--cache", "warm"), ("--repeats", "2")])
def test_states_that_cannot_be_brought_about_are_refused(
    harness: Harness, tmp_path: Path, flags: tuple[str, str]
) -> None:
    result = run(harness, tmp_path / "run", "--arm", "theirs=http://127.0.0.1:1/v1", *flags)
    assert result.exit_code == 2
    assert f"{flags[0]}" in result.stderr and "--arm" in result.stderr


def test_a_run_that_goes_on_sends_a_server_only_what_is_missing(
    harness: Harness, tmp_path: Path
) -> None:
    """Others serve stored requests again; a server elsewhere was not stopped with the run."""
    output = tmp_path / "run"
    stopping = Harness(harness.samples, engines={"mepic": InterruptedEngine("mepic")})
    with serving(CompletionServer()) as server:
        flags = ("--arm", f"theirs={server.url}")
        assert run(stopping, output, *flags).exit_code == 130
        assert len(server.bodies) == 1
        result = run(harness, output, *flags)
    assert result.exit_code == 0, result.stderr
    assert len({str(body["prompt"]) for body in server.bodies}) == len(server.bodies) == 6
    assert read_run(output).summary["theirs"].requests == 6
    assert read(output / "manifest.json")["attempts"][1]["replayed"] == 1


def test_the_name_and_the_timeout_of_a_server_are_part_of_what_a_run_is_known_by(
    harness: Harness,
) -> None:
    def fingerprint(*arms: str) -> str:
        values = {"algo": ("full",), "dataset": "fake", "arm": arms}
        return prepare(parse_config(values), harness.load, no_gpu).fingerprint

    one = fingerprint("a=http://h:1/v1")
    assert one == fingerprint("a=http://h:1/v1,timeout=600")
    others = "b=http://h:1/v1", "a=http://h:1/v1,timeout=1", "a=http://h:2/v1"
    assert len({one, *map(fingerprint, others)}) == 4
