"""The command line, end to end over fake engines."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner, Result
from harness_fakes import (
    REFUSED,
    DeafEngine,
    FakeEngine,
    Harness,
    InterruptedEngine,
    RefusingEngine,
    make_sample,
)
from sweep_fakes import SweepHarness

from picbench.cli import main
from picbench.run import arm as fleet
from picbench.store.reader import read_run
from picbench.store.records import hash_tokens

ARMS = "full,prefix,naive,epic:k=16,mepic"
FILES = {
    "manifest.json",
    "workload.jsonl",
    "samples.jsonl",
    "batches.jsonl",
    "memory.parquet",
    "summary.json",
}


def invoke(harness: Harness | None, *arguments: str) -> Result:
    services = harness.services() if harness else None
    return CliRunner().invoke(main, arguments, obj=services)


def run(harness: Harness, output: Path, *arguments: str) -> Result:
    flags = ("--only", "--dataset", "fake", "--data", "d", "--output", str(output))
    return invoke(harness, "run", *flags, *arguments)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def verdict(result: Result) -> str:
    """The last line on stderr, below the progress."""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("picbench: ")
    return line.removeprefix("picbench: ")


def last_line(result: Result) -> dict[str, Any]:
    """What programs read on stdout."""
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def harness() -> Harness:
    return Harness([make_sample(n) for n in range(10)])


@pytest.fixture
def known_model(tmp_path: Path) -> Harness:
    """A harness whose model has a configuration, as several GPUs need one."""
    return SweepHarness(model=tmp_path)


def test_a_run_writes_its_directory_and_names_it_last(harness: Harness, tmp_path: Path) -> None:
    output = tmp_path / "new" / "run"
    result = run(harness, output, "--algo", ARMS)
    assert result.exit_code == 0, result.stderr
    assert last_line(result)["run"] == str(output)
    names = {path.name for path in output.iterdir()}
    assert names == {*FILES, "logs"}
    assert {server.state for server in harness.servers.values()} == {"closed"}


def test_a_line_below_the_table_says_what_reuse_gains(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", ARMS)
    line = "mepic against full: first token in 0.25x the time, 1.00x the blocks at peak (n=10)"
    assert line in result.stdout.splitlines()
    alone = run(harness, tmp_path / "alone", "--algo", "mepic")
    assert "against full" not in alone.stdout


def test_the_summary_has_the_promised_keys(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", ARMS)
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["schema"] == 3
    assert list(summary["arms"]) == ARMS.split(",")
    arm = summary["arms"]["mepic"]
    assert arm["requests"] == 10
    assert set(arm["ttft_ms"]) == {"p50", "p90", "p95", "p99"}
    assert arm["ttft_ms"]["p50"] == pytest.approx(100)
    assert arm["ttft_vs_full"] == {"geomean": pytest.approx(0.25), "pairs": 10}
    assert arm["tpot_ms"] == pytest.approx(10)
    means = {"mean": 1.0, "parsed_mean": 1.0}
    assert arm["score"] == {"metric": "f1", "meaningful": False} | means
    assert arm["outcomes"] == {"answered": 10, "abstained": 0, "unparsed": 0, "error": 0}
    assert arm["blocks"]["pool"] == 100
    assert arm["blocks"]["peak_referenced"] == 20
    assert arm["tokens"] == {
        "prompt": 360,
        "reused": 160,
        "prefix": 0,
        "loaded": {},
        "compiled": 40,
        "compile_work": 40,
        "linked": 30,
        "padded": 20,
    }
    assert summary["workload"]["samples"] == 10
    assert summary["provenance"]["packages"]["picbench"]


def test_the_manifest_tells_what_ran(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", "full,mepic", "--seed", "3")
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["status"] == "complete"
    assert manifest["ended"] >= manifest["began"]
    assert manifest["config"]["seed"] == 3
    assert manifest["arms"]["full"]["stock"] is True
    assert manifest["arms"]["mepic"]["stock"] is False
    assert manifest["arms"]["mepic"]["engine"]["vllm"] == "fake"
    assert manifest["arms"]["mepic"]["settings"]["algorithm"] == "mepic"


def test_what_engines_chose_is_said_once_and_kept(harness: Harness, tmp_path: Path) -> None:
    note = "the model is served in float32: this CPU has neither AVX512_BF16 nor AMX"
    harness.engines = {arm: FakeEngine(arm, notes=[note]) for arm in ("full", "mepic")}
    result = run(harness, tmp_path / "run", "--algo", "full,mepic")
    assert result.stderr.splitlines().count(f"picbench: {note}") == 1
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["arms"]["mepic"]["engine"]["notes"] == [note]


@pytest.mark.parametrize(("tiers", "given"), [([], None), (["--tiers", ""], "")])
def test_default_tiers_are_left_to_the_device(
    harness: Harness, tmp_path: Path, tiers: list[str], given: str | None
) -> None:
    assert run(harness, tmp_path / "run", "--algo", "mepic", *tiers).exit_code == 0
    assert harness.servers["mepic"].config.tiers == given
    assert read(tmp_path / "run" / "manifest.json")["config"]["tiers"] == given


def test_tiers_that_slow_an_arm_are_named_below_the_table(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {
        "naive": FakeEngine("naive", tier_seconds=0.1),
        "mepic": FakeEngine("mepic", tier_seconds=0.6),
    }
    result = run(harness, tmp_path / "run", "--algo", "naive,mepic")
    (line,) = [line for line in result.stdout.splitlines() if "tiers took" in line]
    assert line == 'mepic: tiers took 30% of the arm\'s steps: --tiers "" serves without'
    times = read(tmp_path / "run" / "summary.json")["arms"]["mepic"]["step_times"]
    assert times["tiers"] == pytest.approx(0.3 * times["steps"])


def test_kernels_that_are_compiled_late_are_named_below_the_table(
    harness: Harness, tmp_path: Path
) -> None:
    late = FakeEngine("mepic", compilations=("picbench.kernels.b.walk", "vllm.c.attend"))
    harness.engines = {"naive": FakeEngine("naive"), "mepic": late}
    result = run(harness, tmp_path / "run", "--algo", "naive,mepic", "--limit", "1")
    (line,) = [line for line in result.stdout.splitlines() if "compiled meanwhile" in line]
    assert line == "mepic: 2 kernels were compiled meanwhile: attend, walk"
    arms = read(tmp_path / "run" / "summary.json")["arms"]
    assert arms["mepic"]["compiled"] == {"picbench.kernels.b.walk": 1, "vllm.c.attend": 1}
    assert arms["naive"]["compiled"] == {}


def test_a_password_in_tiers_stays_out_of_the_run_directory(
    harness: Harness, tmp_path: Path
) -> None:
    tiers = "host:64MiB,redis://me:s3cret@kv:6379/0"
    run(harness, tmp_path / "run", "--algo", "mepic", "--tiers", tiers)
    manifest = read(tmp_path / "run" / "manifest.json")
    assert manifest["config"]["tiers"] == "host:64MiB,redis://***@kv:6379/0"
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or b"s3cret" not in file.read_bytes()


def test_rows_and_ledger_cover_every_arm_and_sample(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", "full,mepic", "--concurrency", "1")
    rows = read_run(tmp_path / "run").rows
    assert len({(row.arm, row.sample) for row in rows}) == len(rows) == 20
    assert len({row.prompt_sha256 for row in rows}) == 10
    memory = pq.read_table(tmp_path / "run" / "memory.parquet").to_pylist()
    assert [m["step"] for m in memory if m["arm"] == "full"] == list(range(30))
    assert memory[0]["pool"] == memory[0]["free"] + memory[0]["prompt"]


def test_arms_alternate_and_rotate_at_concurrency_one(harness: Harness, tmp_path: Path) -> None:
    flags = ("--algo", "full,naive,mepic", "--concurrency", "1", "--limit", "4")
    run(harness, tmp_path / "run", *flags)
    answers = [entry for entry in harness.order if " " not in entry]
    assert answers[:6] == ["full", "naive", "mepic", "naive", "mepic", "full"]
    assert answers[6:9] == ["mepic", "full", "naive"]


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (11, 2), (12, 3), (64, 5)])
def test_engines_start_a_few_at_a_time(
    harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    most: int,
) -> None:
    monkeypatch.setattr(fleet, "cores", lambda: cores)
    run(harness, tmp_path / "run", "--algo", ARMS)
    starting = peak = 0
    for entry in harness.order:
        starting += entry.startswith("launch ") - entry.startswith("ready ")
        peak = max(peak, starting)
    assert peak == most
    names = ARMS.split(",")
    for word in ("launch", "ready"):
        assert [e for e in harness.order if e.startswith(word)] == [f"{word} {n}" for n in names]


def test_every_engine_gets_the_same_pool_and_context(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", ARMS, "--kv-blocks", "50", "--context", "64")
    configs = [server.config for server in harness.servers.values()]
    assert {(c.kv_blocks, c.context, c.model) for c in configs} == {(50, 64, "fake")}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (
            "--device cuda --tensor-parallel 2 --eager",
            {"device": "cuda", "tensor_parallel": 2, "eager": True},
        ),
        ("--keys-without-rope", {"keys_without_rope": True}),
        ("--compile-order isps", {"compile_order": "isps"}),
        ("--shared-decode always", {"shared_decode": "always"}),
        (
            "",
            {"device": "auto", "tensor_parallel": 1, "eager": False, "keys_without_rope": False},
        ),
    ],
)
def test_settings_reach_every_engine_and_the_manifest(
    known_model: Harness, tmp_path: Path, flags: str, settings: dict[str, object]
) -> None:
    run(known_model, tmp_path / "run", "--algo", "full,mepic", *flags.split())
    manifest = read(tmp_path / "run" / "manifest.json")
    noted = [manifest["config"], *(arm["settings"] for arm in manifest["arms"].values())]
    given = [asdict(server.config) for server in known_model.servers.values()]
    assert len(given) == 2
    for found in (*noted, *given):
        assert found.items() >= settings.items()


def test_gpus_that_cannot_share_the_heads_are_refused(known_model: Harness, tmp_path: Path) -> None:
    result = run(known_model, tmp_path / "run", "--algo", "mepic", "--tensor-parallel", "8")
    assert result.exit_code == 2
    assert "--tensor-parallel 8: the model has 4 attention heads" in verdict(result)
    assert "possible are 1, 2, 4" in verdict(result)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--device", "cpu"),
        ("--tensor-parallel", "2"),
        ("--eager",),
        ("--keys-without-rope",),
        ("--compile-order", "batch"),
        ("--shared-decode", "always"),
    ],
)
def test_runs_on_other_devices_are_other_runs(
    known_model: Harness, tmp_path: Path, flags: Sequence[str]
) -> None:
    run(known_model, tmp_path / "a", "--algo", "mepic")
    run(known_model, tmp_path / "b", "--algo", "mepic", *flags)
    one, other = (read(tmp_path / name / "manifest.json")["fingerprint"] for name in "ab")
    assert one != other


def test_the_self_check_is_for_engines_with_picbench_in_them(
    harness: Harness, tmp_path: Path
) -> None:
    run(harness, tmp_path / "run", "--algo", "full,prefix,mepic", "--self-check")
    checked = {name: server.config.self_check for name, server in harness.servers.items()}
    assert checked == {"full": False, "prefix": False, "mepic": True}


def test_same_engine_takes_full_and_prefix_off_stock(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", "full,prefix,mepic", "--same-engine")
    assert not any(server.config.stock for server in harness.servers.values())


def test_an_arm_that_reorders_sends_other_prompts_and_the_table_says_so(
    harness: Harness, tmp_path: Path
) -> None:
    result = run(harness, tmp_path / "run", "--algo", "prefix,reorder")
    assert "reorder: prompts have their chunks in another order, each once" in result.stdout
    assert "0 of 10 are consecutive text" in " ".join(result.stdout.split())
    assert {name: s.config.algorithm for name, s in harness.servers.items()} == {
        "prefix": "prefix",
        "reorder": "prefix",
    }
    rows = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    sent = {(row["arm"], row["sample"]): row["prompt_sha256"] for row in rows}
    # The second chunk of all samples is the same: from the second prompt on it comes first.
    same = [sent["prefix", f"s{n}"] == sent["reorder", f"s{n}"] for n in range(10)]
    assert same == [True] + [False] * 9
    plain = run(harness, tmp_path / "plain", "--algo", "prefix")
    assert "another order" not in plain.stdout


def test_preloaded_chunks_are_known_to_an_arm_that_reorders(tmp_path: Path) -> None:
    first, second = make_sample(0), make_sample(1)
    harness = Harness([second], preload=[first])
    run(harness, tmp_path / "run", "--algo", "reorder")
    row = read(tmp_path / "run" / "samples.jsonl")
    assert row["prompt_sha256"] != hash_tokens(second.tokens)


def test_the_table_says_that_random_weights_mean_nothing(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", "full,mepic")
    assert "random weights: accuracy not meaningful" in result.stdout
    assert "0.25x" in result.stdout
    harness.weights = "real"
    result = run(harness, tmp_path / "other", "--algo", "full,mepic")
    assert "not meaningful" not in result.stdout


def test_progress_goes_to_stderr_in_plain_lines(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", "full,mepic")
    assert "20/20 requests" in result.stderr
    assert "\x1b" not in result.output
    assert "requests/s" not in result.stdout


def test_the_default_directory_names_data_set_model_and_fingerprint(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(harness, "run", "--dataset", "fake", "--data", "d", "--algo", "mepic")
    path = Path(last_line(result)["run"])
    _, dataset, model, fingerprint = path.name.split("-")
    assert (path.parent, dataset, model) == (Path("runs"), "fake", "testbed")
    assert read(path / "summary.json")["fingerprint"].startswith(fingerprint)


def test_a_dry_run_starts_and_writes_nothing(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", ARMS, "--dry-run")
    assert result.exit_code == 0
    assert not harness.order
    assert list(tmp_path.iterdir()) == []
    for fact in ("epic:k=16 on the PIC engine", "prefix on stock vLLM", "20, 11 distinct"):
        assert fact in result.stdout


def test_a_refused_request_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    samples = [make_sample(n, first=REFUSED if n == 1 else 1) for n in range(6)]
    result = run(Harness(samples), tmp_path / "run", "--algo", "full,mepic", "--concurrency", "1")
    assert result.exit_code == 4
    assert verdict(result).startswith("2 of 12 requests failed")
    last = last_line(result)
    assert (last["run"], last["exit_code"]) == (str(tmp_path / "run"), 4)
    errors = {(row.arm, row.sample): row.error for row in read_run(tmp_path / "run").rows}
    assert errors[("mepic", "s1")] == "a chunk is too long (`context`)"
    assert [key for key, error in errors.items() if error is None and key[1] == "s1"] == []
    assert read(tmp_path / "run" / "manifest.json")["status"] == "partial"
    assert read(tmp_path / "run" / "summary.json")["arms"]["mepic"]["failed"] == 1


def test_rows_that_ran_apart_are_kept_but_not_timed(tmp_path: Path) -> None:
    samples = [make_sample(n, first=REFUSED if n == 1 else 1) for n in range(6)]
    run(Harness(samples), tmp_path / "run", "--algo", "mepic", "--concurrency", "4")
    rows = read_run(tmp_path / "run").rows
    assert [row.error is None for row in rows] == [True, False, True, True, True, True]
    assert not any(row.timed for row in rows)
    arm = read(tmp_path / "run" / "summary.json")["arms"]["mepic"]
    assert arm["ttft_ms"] is None
    assert arm["throughput_tok_s"] is None
    assert arm["score"]["mean"] == 1.0


def test_a_dead_engine_fails_its_arm_alone(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(4)], dies_at={"mepic": 1})
    result = run(harness, tmp_path / "run", "--algo", "full,mepic", "--concurrency", "1")
    assert result.exit_code == 4
    arms = read(tmp_path / "run" / "summary.json")["arms"]
    assert (arms["full"]["failed"], arms["mepic"]["failed"]) == (0, 3)
    errors = [row.error for row in read_run(tmp_path / "run").rows if row.arm == "mepic"]
    assert errors[0] is None
    assert all("SIGKILL" in error for error in errors[1:])


def test_a_failed_start_leaves_nothing_behind(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"mepic": RefusingEngine()}
    result = run(harness, tmp_path / "a" / "run", "--algo", "full,mepic,naive")
    assert result.exit_code == 2
    assert verdict(result) == "sliding window is not supported (--model)"
    assert list(tmp_path.iterdir()) == []
    assert {server.state for server in harness.servers.values()} == {"killed"}


def test_a_failed_start_leaves_an_empty_directory_empty(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"mepic": RefusingEngine()}
    assert run(harness, tmp_path, "--algo", "mepic").exit_code == 2
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_keeps_what_it_has(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"mepic": InterruptedEngine()}
    flags = ("--algo", "full,mepic", "--concurrency", "1")
    result = run(harness, tmp_path / "run", *flags)
    last = last_line(result)
    assert (last["status"], last["exit_code"]) == ("interrupted", 130)
    assert result.exit_code == 130
    assert verdict(result) == "interrupted"
    assert len(read_run(tmp_path / "run").rows) == 2
    assert read(tmp_path / "run" / "manifest.json")["status"] == "interrupted"
    assert read(tmp_path / "run" / "summary.json")["arms"]["mepic"]["requests"] == 1
    assert {server.state for server in harness.servers.values()} == {"killed"}


def test_the_same_command_goes_on_after_an_interrupt(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"mepic": InterruptedEngine()}
    flags = ("--algo", "full,mepic", "--concurrency", "1")
    assert run(harness, tmp_path / "run", *flags).exit_code == 130
    harness.engines = {}
    result = run(harness, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.stderr
    planned = run(harness, tmp_path / "run", *flags, "--dry-run")
    assert "(complete: would only be shown)" in planned.stdout
    assert f"{tmp_path / 'run'}: resuming after 2 of 20 requests" in result.stderr
    assert "20/20 requests" in result.stderr
    attempts = read(tmp_path / "run" / "manifest.json")["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["interrupted", "complete"]
    assert len(read_run(tmp_path / "run").rows) == 20


def test_an_unfinished_run_is_found_by_its_settings(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("run", "--dataset", "fake", "--data", "d", "--concurrency", "1", "--algo")
    harness.engines = {"mepic": InterruptedEngine()}
    first = last_line(invoke(harness, *command, "mepic"))["run"]
    harness.engines = {}
    other = last_line(invoke(harness, *command, "naive"))["run"]
    planned = invoke(harness, *command, "mepic", "--dry-run").stdout
    assert f"{first} (interrupted: would be resumed)" in planned
    result = invoke(harness, *command, "mepic")
    assert (last_line(result)["run"], result.exit_code) == (first, 0)
    assert first != other
    assert "would be resumed" not in invoke(harness, *command, "mepic", "--dry-run").stdout
    third = last_line(invoke(harness, *command, "mepic"))["run"]
    fourth = last_line(invoke(harness, *command, "mepic"))["run"]
    assert len({first, other, third, fourth}) == 4


def test_a_finished_run_is_shown_again(harness: Harness, tmp_path: Path) -> None:
    first = run(harness, tmp_path / "run", "--algo", "full,mepic")
    order = list(harness.order)
    again = run(harness, tmp_path / "run", "--algo", "full,mepic")
    assert harness.order == order
    assert again.stdout == first.stdout
    assert "has ended and is only shown; name a new directory to measure again" in again.stderr


def test_the_directory_of_another_run_is_a_usage_error(harness: Harness, tmp_path: Path) -> None:
    run(harness, tmp_path / "run", "--algo", "full,mepic")
    result = run(harness, tmp_path / "run", "--algo", "full,mepic", "--seed", "1")
    assert result.exit_code == 2
    assert verdict(result).startswith(f"--output {tmp_path / 'run'}: has a run with other settings")
    assert result.stdout == ""


def test_quiet_runs_print_one_line(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", "full,mepic", "--quiet")
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert (found["status"], found["exit_code"]) == ("complete", 0)
    assert found["arms"]["mepic"] == {
        "provenance": "measured",
        "requests": 10,
        "failed": 0,
        "ttft_p50_ms": pytest.approx(100),
        "ttft_vs_full": pytest.approx(0.25),
        "score": None,
        "peak_blocks": 20,
        "reused_tokens": 160,
    }
    refused = run(harness, tmp_path / "other", "--algo", "mepik", "--quiet")
    assert (refused.stdout, len(refused.stderr.splitlines())) == ("", 1)


def test_a_baseline_that_hits_a_cache_is_invalid(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"full": FakeEngine("mepic")}
    result = run(harness, tmp_path / "run", "--algo", "full,mepic")
    assert result.exit_code == 3
    assert "16 tokens came from a cache that must be off" in verdict(result)
    assert read(tmp_path / "run" / "manifest.json")["status"] == "invalid"


def test_an_arm_on_other_tokens_is_invalid(harness: Harness, tmp_path: Path) -> None:
    harness.engines = {"mepic": DeafEngine()}
    result = run(harness, tmp_path / "run", "--algo", "mepic")
    assert result.exit_code == 3
    assert verdict(result).startswith("arm mepic, sample s0: the engine ran other token ids")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algo", "mepik"], "--algo: unknown algorithm 'mepik' (did you mean 'mepic'?)"),
        (["--algo", "full,full"], "--algo: full is given twice"),
        (["--algo", "epic,epic:k=16"], "--algo: epic:k=16 is given twice"),
        (["--algo", "full,,mepic"], "--algo: an empty name between commas"),
        (["--algo", ""], "--algo: no algorithm given"),
        (["--algo", "epic:k=-3"], "--algo: 'epic:k=-3': k=-3 is not possible"),
        (["--algo", "epic:kk=1"], "unknown option 'kk=1' of epic (did you mean 'k'?)"),
        (["--limit", "0"], "--limit 0: input should be greater than or equal to 1"),
        (["--concurrency", "-1"], "--concurrency -1: "),
        (["--kv-blocks", "2"], "--kv-blocks 2: the longest request needs 3"),
        (["--seed", str(1 << 32)], "--seed 4294967296: input should be less than 4294967296"),
        (["--limit", "many"], "Invalid value for '--limit': 'many' is not a valid integer"),
        (["--dtype", "float8"], "Invalid value for '--dtype'"),
        (["--device", "tpu"], "Invalid value for '--device': 'tpu' is not one of"),
        (["--tensor-parallel", "0"], "--tensor-parallel 0: input should be greater than or equal"),
        (["--drop", "tail"], "Invalid value for '--drop': 'tail' is not"),
        (["--limt", "1"], "'--limit'"),
    ],
)
def test_bad_flags_give_one_line_and_exit_2(
    harness: Harness, tmp_path: Path, flags: Sequence[str], said: str
) -> None:
    result = run(harness, tmp_path / "run", *flags)
    assert result.exit_code == 2
    assert said in verdict(result)
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert not harness.order


def test_a_directory_in_use_is_refused(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    result = run(harness, tmp_path)
    assert result.exit_code == 2
    assert verdict(result) == f"--output {tmp_path}: exists and is not empty (name a new folder)"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unwritable_output_is_refused(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(harness, tmp_path / "file" / "run")
    assert result.exit_code == 2
    assert "cannot be written: Not a directory" in verdict(result)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dataset", "musiqe", "--data", "."], "did you mean 'musique'?"),
        (["--dataset", "musique", "--data", "nowhere"], "--data nowhere: no such folder"),
        (["--dataset", "musique", "--data", ".", "--model", "shape:tine"], "'shape:tiny'"),
        (["--dataset", "ruler:vtt"], "did you mean 'ruler:vt'?"),
        (["--dataset", "ruler:vt", "--grid", "9-9000:2x2"], "--grid: 9000 tokens, where the"),
        (["--data", "."], "name one of --dataset and --requests"),
        (["--requests", "r.jsonl", "--drop", "lead"], "--drop and --requests: requests are"),
    ],
)
def test_bad_names_reach_the_user_from_the_real_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(None, "run", *flags)
    assert result.exit_code == 2
    assert said in verdict(result)
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(harness: Harness, tmp_path: Path) -> None:
    result = run(harness, tmp_path / "run", "--algo", "mepik", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_a_bug_is_one_line_too(tmp_path: Path) -> None:
    result = run(Harness([]), tmp_path / "run", "--algo", "mepic")
    assert result.exit_code == 70
    assert verdict(result).startswith("internal error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "name"), [("algorithms", "mepic"), ("datasets", "musique"), ("models", "shape:tiny")]
)
def test_list_names_what_run_takes(kind: str, name: str) -> None:
    result = invoke(None, "list", kind)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()].count(name) == 1


def test_help_names_the_commands() -> None:
    result = invoke(None, "--help")
    assert result.exit_code == 0
    assert {"run", "list"} <= {line.split()[0] for line in result.stdout.splitlines() if line}


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["list", "nothing"], 2)])
def test_the_package_runs_as_the_command_does(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "picbench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = invoke(None, *arguments)
    assert done.returncode == ours.exit_code == code
    assert done.stdout.split()[-1:] == ours.stdout.split()[-1:]
    assert len(done.stderr.splitlines()) == (1 if code else 0)


def test_no_arguments_is_a_usage_error() -> None:
    result = invoke(None)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize("command", sorted(main.list_commands(click.Context(main))))
def test_help_of_a_command_imports_nothing_that_computes(command: str) -> None:
    code = (
        "import sys; from picbench.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'numpy', 'scipy', 'pandas', 'transformers', 'matplotlib'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("arguments", [["--help"], ["list", "algorithms"], ["list", "models"]])
def test_help_and_listings_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from picbench.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'pydantic', 'numpy', 'rich', 'pyarrow', 'transformers'}\n"
        "heavy |= {'pandas', 'matplotlib'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
