"""Runs with an arm that is a server elsewhere."""

import json
import shutil
from collections import Counter
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
from picbench.workloads.testbed import model_path


@pytest.fixture
def harness() -> Harness:
    return Harness([make_sample(n) for n in range(6)])


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run(harness: Harness, output: Path, *flags: str) -> Result:
    given = ("run", "--dataset", "fake", "--algo", "full,mepic", "--concurrency", "1")
    services = replace(harness.services(), files=write_run_files)
    return CliRunner().invoke(main, [*given, "--output", str(output), *flags], obj=services)


def run_with(server: CompletionServer, harness: Harness, output: Path, *, code: int = 0) -> str:
    """What is printed by a run with the arm `theirs`."""
    with serving(server):
        result = run(harness, output, "--arm", f"theirs={server.url}")
    assert result.exit_code == code, result.stderr
    return result.stdout


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def cells(printed: str) -> list[str]:
    """The cells of the arm in the printed table."""
    line = next(text for text in printed.splitlines() if text.startswith("│ theirs"))
    return [cell.strip() for cell in line.split("│")]


def test_a_server_elsewhere_is_an_arm_beside_the_others(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-secret")
    server, output = CompletionServer(), tmp_path / "run"
    assert cells(run_with(server, harness, output))[-4:-1] == ["-", "-", "-"]
    prompts = [list(sample.tokens) for sample in harness.samples]
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompts)

    found = read_run(output)
    rows = [row for row in found.rows if row.arm == "theirs"]
    assert {(row.score, row.tokens.reused, row.prefill_ms) for row in rows} == {(1.0, None, None)}
    ours = {row.sample: row.prompt_sha256 for row in found.rows if row.arm == "full"}
    assert {row.sample: row.prompt_sha256 for row in rows} == ours
    arm = found.summary["theirs"]
    assert (arm.tokens.reused, arm.tokens.computed, arm.output_tokens) == (None, None, 12)
    assert arm.ttft_vs_full is not None and arm.ttft_vs_full.pairs == 6
    assert read(output / "manifest.json")["arms"]["theirs"]["engine"]["url"] == server.url
    files = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    assert not any(b"k-secret" in content for content in files)

    assert (output / "table.md").exists()
    compared = measured_arms(found)["theirs"]
    assert "reused_tokens" not in compared.counters and "peak_blocks" not in compared.totals
    assert compared.counters["output_tokens"] == (2,) * 6
    shown = invoke("show", output)
    assert shown.exit_code == 0 and f"theirs={server.url}" in shown.output
    page = invoke("report", output, "--output", tmp_path / "r.html")
    assert page.exit_code == 0, page.output


def test_counters_that_the_server_gives_are_kept(harness: Harness, tmp_path: Path) -> None:
    run_with(CompletionServer(cached=9), harness, tmp_path / "run")
    arm = read_run(tmp_path / "run").summary["theirs"]
    assert (arm.tokens.reused, arm.tokens.computed) == (6 * 9, 6 * (36 - 9))


def test_what_the_server_counts_by_itself_is_kept_and_shown(
    harness: Harness, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    printed = run_with(CompletionServer(metrics=vllm_metrics), harness, output)
    assert read_run(output).summary["theirs"].counted == ServerCounts(
        prompt_tokens=6 * 36,
        cached_tokens=6 * 9,
        queried_tokens=6 * 36,
        hit_tokens=6 * 8,
        external_hit_tokens=None,
        preemptions=6,
        peak_kv_usage=0.25,
    )
    batches = [json.loads(line) for line in (output / "batches.jsonl").read_text().splitlines()]
    assert {b["counted"]["cached_tokens"] for b in batches if b["arm"] == "theirs"} == {9}
    assert {b["counted"] for b in batches if b["arm"] != "theirs"} == {None}
    assert cells(printed)[-4:-1] == ["25.0%", "-", "-"]
    assert (
        "theirs: by its own counters 25.0% of prompt tokens came from its caches; 6 preemptions; "
        "at most 25% of its KV memory was seen in use"
    ) in " ".join(printed.split())
    assert read(output / "manifest.json")["arms"]["theirs"]["engine"]["metrics"] is True
    frame = pd.read_csv(output / "table.csv").set_index("arm")
    assert frame["counted_cached_tokens"].dropna().to_dict() == {"theirs": 54}
    assert "| 25.0 |" in (output / "table.md").read_text()
    assert "serves others" not in printed


def test_a_server_that_serves_others_meanwhile_is_told_of(harness: Harness, tmp_path: Path) -> None:
    def busy(server: CompletionServer) -> str:
        return f"vllm:prompt_tokens_total {100 * len(server.bodies)}.0\n"

    said = run_with(CompletionServer(metrics=busy), harness, tmp_path / "run")
    told = "600 prompt tokens where 216 were sent: it serves others, too"
    assert told in " ".join(said.split())


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
        assert "sim (simulated)" in invoke("table", output, "--format", style).stdout
    # A server elsewhere has no ledger, so that the figure of memory does not have it.
    for name in ("ttft", "accuracy"):
        figure = (output / f"{name}.svg").read_text()
        assert "sim (simulated)" in figure and ">full<" in figure
    invoke("report", output, "--output", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("sim: simulated") > 3
    assert "sim is simulated: no engine computed anything" in page
    compared = invoke("compare", output, "--arms", "full,sim")
    assert "sim is simulated: no engine computed anything" in compared.stdout, compared.output


def test_failing_requests_are_failed_rows(harness: Harness, tmp_path: Path) -> None:
    server = CompletionServer(fails=lambda prompt: 1002 in prompt)
    run_with(server, harness, tmp_path / "run", code=4)
    [failed] = [row for row in read_run(tmp_path / "run").rows if row.error is not None]
    assert (failed.arm, failed.sample) == ("theirs", "s2")
    assert failed.error == 'HTTP 500: {"error": "out of\\nmemory"}'


@pytest.mark.parametrize(
    ("text", "tokens", "end", "error"),
    [
        ("yes", 1, "abort", "the reply ended with abort"),
        ("yes", 1, "error", "the reply ended with error"),
        ("", 0, "stop", "the reply has no token"),
        ("", 0, "length", "the reply has no token"),
    ],
)
def test_a_reply_that_was_given_up_is_a_failed_row(
    harness: Harness, tmp_path: Path, text: str, tokens: int, end: str, error: str
) -> None:
    """It is the fastest one, is right, and counts for nothing."""
    answered = Counter[str]()

    def events(whole: list[Any]) -> list[Any]:
        answered["all"] += 1
        if answered["all"] > 2:
            return whole
        usage = {"prompt_tokens": 36, "completion_tokens": tokens}
        return [
            {"choices": [{"text": text, "finish_reason": None}]},
            {"choices": [{"text": "", "finish_reason": end}]},
            {"choices": [], "usage": usage},
        ]

    with serving(CompletionServer(events=events)) as server:
        flags = ("--arm", f"theirs={server.url}", "--slo", "ttft=60000")
        assert run(harness, tmp_path / "run", *flags).exit_code == 4
    found = read_run(tmp_path / "run")
    rows = [row for row in found.rows if row.arm == "theirs"]
    failed = [row for row in rows if row.error is not None]
    assert [row.error for row in failed] == [error] * 2
    assert {(row.timed, row.score, row.ttft_ms, row.outcome) for row in failed} == {
        (False, None, None, "error")
    }
    arm = found.summary["theirs"]
    assert (arm.failed, arm.outcomes["answered"], arm.output_tokens) == (2, 4, 8)
    assert arm.goodput_req_s is not None
    assert round(arm.goodput_req_s * arm.busy_s) == 4


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


#: What each prompt of the harness has: its chunks, as its requests name them.
SPANS = [2, 18, 18, 34]


def alone(server: CompletionServer, harness: Harness, output: Path, **options: str) -> Result:
    """A run of the arm `theirs` and no other."""
    extra = "".join(f",{name}={value}" for name, value in options.items())
    with serving(server):
        given = ("run", "--dataset", "fake", "--concurrency", "1", "--output", str(output))
        services = replace(harness.services(), files=write_run_files)
        arm = f"theirs={server.url}{extra}"
        return CliRunner().invoke(main, [*given, "--arm", arm], obj=services)


def test_servers_alone_start_no_engine_and_are_sent_the_chunks(
    harness: Harness, tmp_path: Path
) -> None:
    server, output = CompletionServer(cached=9), tmp_path / "run"
    result = alone(server, harness, output, algo="epic:k=4")
    assert result.exit_code == 0, result.output
    assert harness.servers == {} and "starting" not in result.stderr
    sent = {json.dumps(body["vllm_xargs"]) for body in server.bodies}
    assert sent == {json.dumps({"pic_algorithm": "epic:k=4", "pic_spans": SPANS})}
    arm = read_run(output).summary["theirs"]
    assert (arm.tokens.reused, arm.without_reuse) == (54, False)
    assert read(output / "manifest.json")["arms"]["theirs"]["settings"]["algo"] == "epic:k=4"
    assert "without reuse" not in result.output
    again = alone(server, harness, output, algo="epic:k=4")
    assert again.exit_code == 2  # It is at another port.


@pytest.mark.parametrize("cached", [None, 0, 2])
def test_a_server_that_ignores_chunks_is_said_to(
    harness: Harness, tmp_path: Path, cached: int | None
) -> None:
    """All prompts begin with the same two tokens, and have a chunk in common after their own."""
    output = tmp_path / "run"
    result = alone(CompletionServer(cached=cached), harness, output, algo="mepic")
    assert result.exit_code == 3, result.output
    assert "│ theirs (served without reuse) " in result.stdout
    assert "--arm theirs: served without reuse" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["exit_code"] == 3
    assert read(output / "summary.json")["arms"]["theirs"]["without_reuse"] is True
    assert "| theirs (served without reuse) |" in (output / "table.md").read_text()
    assert CliRunner().invoke(main, ["report", str(output)]).exit_code == 0
    said = "theirs is served without reuse: it reused none of the chunks that it was sent"
    assert f"<li>{said}.</li>" in (output / "report.html").read_text("utf-8")
    compared = CliRunner().invoke(main, ["compare", str(output), str(output)])
    assert said in " ".join(compared.stdout.split()), compared.output


@pytest.mark.parametrize(("reused", "code"), [(9, 0), (1, 3)])
def test_a_server_whose_replies_do_not_say_is_judged_by_its_counters(
    harness: Harness, tmp_path: Path, reused: int, code: int
) -> None:
    def metrics(server: CompletionServer) -> str:
        tokens = sum(len(body["prompt"]) for body in server.bodies)
        found = reused * len(server.bodies)
        return f"vllm:prompt_tokens_total {tokens}\nvllm:prompt_tokens_cached_total {found}\n"

    server = CompletionServer(metrics=metrics)
    assert alone(server, harness, tmp_path / "run", algo="mepic").exit_code == code


def test_a_server_is_sent_prompts_in_another_order_and_no_chunks_where_it_is_to_reorder(
    harness: Harness, tmp_path: Path
) -> None:
    server = CompletionServer()
    assert alone(server, harness, tmp_path / "run", algo="reorder").exit_code == 0
    assert {tuple(body["prompt"][2:18]) for body in server.bodies[1:]} == {(7,) * 16}
    assert {body["vllm_xargs"]["pic_algorithm"] for body in server.bodies} == {"prefix"}


def test_what_arms_run_on_is_recorded_and_where_they_differ_is_said_once(
    harness: Harness, tmp_path: Path
) -> None:
    def metrics(server: CompletionServer) -> str:
        return 'picbench:threads 1.0\npicbench:reserved_cores{pid="7"} 0.0\n'

    output = tmp_path / "run"
    with serving(CompletionServer(metrics=metrics)) as one, serving(CompletionServer()) as other:
        result = run(harness, output, "--arm", f"a={one.url}", "--arm", f"b={other.url}")
    assert result.exit_code == 0, result.stderr
    engines = {n: arm["engine"] for n, arm in read(output / "manifest.json")["arms"].items()}
    told = {n: [engines[n][k] for k in ("vllm", "threads", "reserved_cores")] for n in ("a", "b")}
    assert told == {"a": ["1.2.3", 1, 0], "b": ["1.2.3", None, None]}
    line = "arms do not run alike"
    assert [text.count(line) for text in (result.stderr, (output / "table.md").read_text())] == [
        *(1, 1)
    ]
    assert "vllm: full fake, mepic fake, a 1.2.3, b 1.2.3)" in result.stderr


def test_a_folder_with_a_tokenizer_is_enough_for_servers_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_path().glob("tokenizer*"):
        shutil.copy(file, folder)
    with serving(CompletionServer(cached=40)) as server:
        given = ("run", "--dataset", "musique", "--limit", "2", "--model", str(folder))
        result = invoke(*given, "--arm", f"a={server.url}", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    refused = invoke(*given, "--algo", "full")
    assert refused.exit_code == 2 and "no config.json" in refused.stderr
