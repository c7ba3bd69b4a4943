"""A run that was stopped goes on, and ends as if it had not been."""

import json
import shutil
from collections.abc import Container, Sequence
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from harness_fakes import (
    REFUSED,
    CachingEngine,
    Harness,
    PicEngine,
    make_reusing_samples,
    make_sample,
    run_fakes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from picbench.errors import ConfigError, IncomparableRuns, InvalidRun
from picbench.run.job import find_unfinished
from picbench.store import provenance, writer
from picbench.store.reader import read_run
from picbench.store.records import ArmBatch, SampleRow
from picbench.store.writer import (
    BATCHES,
    LEDGER,
    MANIFEST,
    MEMORY,
    SAMPLES,
    SUMMARY,
    RunDirectory,
    hold,
)
from picbench.workloads.sample import Sample

ARMS = ("full", "naive", "mepic")
COUNT = 7

#: What of a summary does not depend on how fast anything was.
COUNTERS = ("requests", "failed", "score", "tokens", "output_tokens", "hits",
            "moved", "compiled", "outcomes", "cache")  # fmt: skip


@pytest.fixture(autouse=True)
def quick_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: dict(found))


def caching(
    samples: Sequence[Sample] | None = None,
    capacity: int = 5,
    engine: type[CachingEngine | PicEngine] = CachingEngine,
    **settings: Any,
) -> Harness:
    """Engines whose replies depend on what they served before."""
    make = partial(engine, capacity=capacity)
    return Harness(samples or make_reusing_samples(COUNT), make=make, **settings)


def stopped_states(
    folder: Path,
    harness: Harness,
    arms: Sequence[str] = ARMS,
    groups: Container[int] = range(1000),
    **settings: Any,
) -> list[Path]:
    """Copies of a run's directory, as a kill before each of these groups would leave it."""
    copies: list[Path] = []
    numbers = count()

    def copy() -> None:
        if (group := next(numbers)) in groups:
            copies.append(folder / f"stopped-{group}")
            shutil.copytree(folder / "whole", copies[-1])

    harness.watch = copy
    run_fakes(harness, folder / "whole", *arms, **settings)
    return copies


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run measured but for times."""
    run = read_run(folder)
    summary = json.loads((folder / SUMMARY).read_text())
    arms = {
        name: {key: arm[key] for key in COUNTERS} | {"peak": arm["blocks"]["peak_referenced"]}
        for name, arm in summary["arms"].items()
    }
    ledger = run.ledger.groupby("arm")["referenced"].agg(list).to_dict()
    return {
        "status": run.manifest["status"],
        "arms": arms,
        "rows": run.rows,
        "ledger": ledger,
        "files": sorted(path.name for path in folder.iterdir()),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run at concurrency 1, and the states in which it might have been stopped."""
    folder = tmp_path_factory.mktemp("runs")
    states = stopped_states(folder, caching(), concurrency=1)
    assert len(states) == COUNT * len(ARMS)
    return folder / "whole", states


def tear(folder: Path, files: int, share: float) -> None:
    """Undo the last append in so many files; in the one that was written first keep a share."""
    torn = (BATCHES, LEDGER, SAMPLES)[:files]
    rows = len((folder / SAMPLES).read_bytes().splitlines()) - len(read_run(folder).rows[:-1])
    for name in torn:
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        last = rows if name == SAMPLES else 1
        tail = b"".join(lines[-last:])
        part = tail[: int(share * len(tail))] if name == torn[-1] else b""
        (folder / name).write_bytes(b"".join(lines[:-last]) + part)


@settings(max_examples=25)
@given(st.integers(1, COUNT * len(ARMS) - 1), st.integers(0, 3), st.floats(0, 0.99))
def test_a_run_that_was_killed_at_any_byte_ends_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory,
    whole: tuple[Path, list[Path]],
    state: int,
    files: int,
    share: float,
) -> None:
    reference, states = whole
    folder = Path(shutil.copytree(states[state], tmp_path_factory.mktemp("run") / "run"))
    tear(folder, files, share)
    run_fakes(caching(), folder, *ARMS, concurrency=1)
    assert outcome(folder) == outcome(reference)


def test_only_what_is_missing_is_measured(whole: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[1][7], tmp_path / "run"))
    harness = caching()
    run_fakes(harness, folder, *ARMS, concurrency=1)
    # Seven batches are stored: full is not served again, for it reuses nothing.
    planned = [ARMS[(number + place) % 3] for number in range(COUNT) for place in range(3)]
    again = [arm for arm in planned[:7] if arm != "full"]
    assert harness.groups == again + planned[7:]
    first, second = read_run(folder).manifest["attempts"]
    assert (first["status"], first["done"], first["ended"]) == ("running", 0, None)
    assert (second["status"], second["done"], second["replayed"]) == ("complete", 7, 5)
    assert second["changed_outputs"] == 0


def changing_places() -> list[Sample]:
    """Samples of which every second has its two chunks the other way round."""
    samples = make_reusing_samples(12)
    for number in range(1, 12, 2):
        head, first, second, tail = samples[number].segments
        samples[number] = replace(samples[number], segments=(head, second, first, tail))
    return samples


def in_state(state: str | None, concurrency: int, repeats: int = 1) -> tuple[Any, ...]:
    """A case of a declared state of caches; groups that fill caches count as well."""
    samples = make_reusing_samples(4 if repeats > 1 else 15)
    if state == "steady":
        samples = [make_sample(number) for number in range(200)]
    settings = {"cache": state, "concurrency": concurrency, "repeats": repeats}
    given = {"samples": samples, "engine": PicEngine}
    return given, ("full", "prefix", "mepic"), settings, (12, 17, 20) if repeats > 1 else (4, 7)


ONE = {"concurrency": 1}
REFUSED_SECOND = [make_sample(n, first=REFUSED if n == 1 else 1) for n in range(4)]
#: What a harness has, the arms, the settings, and the groups before which a run is stopped.
CASES: dict[str, tuple[Any, ...]] = {
    "larger groups": ({"samples": make_reusing_samples(20)}, ARMS, {"concurrency": 2}, range(99)),
    # Preloading serves one group in each arm.
    "preloaded": ({"preload": make_reusing_samples(6), "capacity": 9}, ARMS, ONE, (8,)),
    "reordered": ({"samples": changing_places()}, ("prefix", "reorder"), ONE, (9, 14, 19)),
    "failed": ({"samples": REFUSED_SECOND}, ARMS, ONE, (11,)),
    **{f"{s} at {n}": in_state(s, n) for s in ("cold", "warm", "steady") for n in (1, 3)},
    **{f"{s} repeated": in_state(s, 1, repeats=3) for s in (None, "cold", "warm")},
}


@pytest.mark.parametrize("case", CASES)
def test_runs_of_all_kinds_end_as_if_they_had_not_been_stopped(case: str, tmp_path: Path) -> None:
    given, arms, settings, groups = CASES[case]
    states = stopped_states(tmp_path, caching(**given), arms, groups, **settings)
    reference = outcome(tmp_path / "whole")
    assert reference["status"] == ("partial" if case == "failed" else "complete")
    for state in states:
        run_fakes(caching(**given), state, *arms, **settings)
        assert outcome(state) == reference
        replayed = read_run(state).manifest["attempts"][1]["replayed"]
        if case.startswith("cold"):
            assert replayed == 0
        # Twelve groups are a repeat.
        assert "repeated" not in case or replayed < 12
    if case == "reordered":
        sent = {(row.arm, row.prompt_sha256) for row in reference["rows"]}
        assert len({prompt for _, prompt in sent}) > len(sent) / 2, "nothing was reordered"


def test_a_run_that_only_lacks_its_end_needs_no_engine(
    whole: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "end"
    monkeypatch.setattr(RunDirectory, "compact", lambda own: shutil.copytree(own.path, folder))
    run_fakes(caching(), tmp_path / "run", *ARMS, concurrency=1)
    monkeypatch.undo()
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"status": "running"}))
    (folder / SUMMARY).unlink()
    harness = caching()
    run_fakes(harness, folder, *ARMS, concurrency=1)
    assert harness.order == []
    assert outcome(folder) == outcome(whole[0])


def test_a_run_goes_on_after_an_error_of_the_system(
    whole: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = RunDirectory.keep

    def full_disk(log: RunDirectory, batch: ArmBatch, rows: Sequence[SampleRow]) -> None:
        if batch.round == 3:
            raise OSError(28, "No space left on device")
        append(log, batch, rows)

    monkeypatch.setattr(RunDirectory, "keep", full_disk)
    with pytest.raises(OSError, match="No space left"):
        run_fakes(caching(), tmp_path / "run", *ARMS, concurrency=1)
    manifest = read_run(tmp_path / "run").manifest
    assert manifest["status"] == "failed"
    assert manifest["reason"] == "OSError: [Errno 28] No space left on device"
    monkeypatch.undo()
    run_fakes(caching(), tmp_path / "run", *ARMS, concurrency=1)
    assert outcome(tmp_path / "run") == outcome(whole[0])
    assert read_run(tmp_path / "run").manifest["reason"] is None


@pytest.mark.parametrize("torn", [SAMPLES, LEDGER, BATCHES])
def test_a_run_goes_on_after_a_full_disk(
    whole: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str
) -> None:
    """No file takes more than half of what is written; those of the run's end take nothing."""
    append, appended = writer._append, list[str]()

    def fill(path: Path, lines: bytes, *, flush: bool) -> None:
        appended.append(path.name)
        full = appended.count(torn) > 4
        append(path, lines[: len(lines) // 2] if full else lines, flush=flush)
        if full:
            for name in ("write_json", "pq.ParquetWriter"):
                monkeypatch.setattr(f"picbench.store.writer.{name}", refuse)
            refuse()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_append", fill)
    with pytest.raises(OSError, match="No space left"):
        run_fakes(caching(), tmp_path / "run", *ARMS, concurrency=1)
    assert read_run(tmp_path / "run").manifest["status"] == "running", "as after a kill"
    monkeypatch.undo()
    harness = caching()
    run_fakes(harness, tmp_path / "run", *ARMS, concurrency=1)
    assert outcome(tmp_path / "run") == outcome(whole[0])
    assert read_run(tmp_path / "run").manifest["attempts"][-1]["done"] == 4


def test_an_arm_that_was_lost_stays_lost(tmp_path: Path) -> None:
    dying = caching(dies_at={"mepic": 2})
    states = stopped_states(tmp_path, dying, concurrency=1)
    run_fakes(caching(), states[-1], *ARMS, concurrency=1)
    assert outcome(states[-1]) == outcome(tmp_path / "whole")
    assert read_run(states[-1]).summary["mepic"].failed == COUNT - 2


def test_an_open_loop_begins_again_with_the_arm_that_was_stopped(tmp_path: Path) -> None:
    arrivals = tuple(n / 4 for n in range(COUNT))
    harness = caching(arrivals=arrivals)
    states = stopped_states(tmp_path, harness)
    served = harness.groups
    assert len(states) == 3
    again = caching(arrivals=arrivals)
    run_fakes(again, states[2], *ARMS)
    assert again.groups == served[2:]
    assert outcome(states[2]) == outcome(tmp_path / "whole")


def test_an_engine_in_another_state_makes_the_run_invalid(
    whole: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole[1][-1], tmp_path / "run"))
    small = caching(engines={"mepic": CachingEngine("mepic", capacity=2)})
    with pytest.raises(InvalidRun, match=r"arm mepic, sample s.: served again, it reused"):
        run_fakes(small, folder, *ARMS, concurrency=1)
    assert read_run(folder).manifest["status"] == "invalid"
    with pytest.raises(InvalidRun, match="served again"):
        run_fakes(caching(), folder, *ARMS, concurrency=1)


def test_other_replies_are_counted(whole: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[1][6], tmp_path / "run"))
    rows = (folder / SAMPLES).read_text().splitlines(keepends=True)
    changed = [json.dumps(json.loads(row) | {"output_sha256": "0"}) + "\n" for row in rows]
    (folder / SAMPLES).write_text("".join(changed))
    run_fakes(caching(), folder, *ARMS, concurrency=1)
    assert read_run(folder).manifest["attempts"][1]["changed_outputs"] == 4


def test_another_environment_another_run_and_another_writer_are_refused(
    whole: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole[1][6], tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"a run with other settings: algo, seed \(") as caught:
        run_fakes(caching(), folder, "full", concurrency=1, seed=3)
    assert "name a new folder" in caught.value.hint
    with pytest.raises(ConfigError, match="a run with other requests"):
        run_fakes(caching(make_reusing_samples(3)), folder, *ARMS, concurrency=1)
    with hold(folder), pytest.raises(ConfigError, match="another process is writing this run"):
        run_fakes(caching(), folder, *ARMS, concurrency=1)
    now = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: now | {"packages": {"vllm": "0.33.0"}})
    with pytest.raises(IncomparableRuns, match="began with other packages"):
        run_fakes(caching(), folder, *ARMS, concurrency=1)


def test_a_finished_run_is_read_and_not_measured(whole: tuple[Path, list[Path]]) -> None:
    folder, harness = whole[0], caching()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run_fakes(harness, folder, *ARMS, concurrency=1) == folder
    assert harness.order == []
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_kill_before_the_manifest_leaves_a_free_directory(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "full.log").write_text("started")
    (tmp_path / "workload.jsonl").write_text("{")
    run_fakes(caching(), tmp_path, *ARMS, concurrency=1)
    assert read_run(tmp_path).manifest["status"] == "complete"


def test_an_unfinished_run_can_be_read(whole: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[1][6], tmp_path / "run"))
    # What an earlier attempt wrote as it was interrupted.
    shutil.copy(whole[0] / SUMMARY, folder / SUMMARY)
    run = read_run(folder)
    assert len(run.rows) == 6
    assert {name: arm.requests for name, arm in run.summary.items()} == dict.fromkeys(ARMS, 2)
    assert run.summary["mepic"].score.metric == "f1"
    ledger = read_run(whole[0]).ledger
    first = ledger[ledger["step"] < 4].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.ledger.drop(columns="time"), first.drop(columns="time"))
    tear(folder, 1, 0.5)
    assert len(read_run(folder).rows) == 5
    assert not (folder / MEMORY).exists()


def test_the_latest_unfinished_run_is_found(
    whole: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = read_run(whole[0]).manifest["fingerprint"]
    runs = {name: tmp_path / f"{name}-fake-{fingerprint[:8]}" for name in "abcd"}
    for name, state in zip("abc", (whole[1][3], whole[1][5], whole[0]), strict=True):
        shutil.copytree(state, runs[name])
    runs["d"].mkdir()
    (runs["d"] / MANIFEST).write_text("{}")
    assert find_unfinished(tmp_path, fingerprint) == runs["b"]
    with hold(runs["b"]):
        assert find_unfinished(tmp_path, fingerprint) == runs["a"]
    assert find_unfinished(tmp_path, fingerprint[:8] + "0" * 56) is None
    assert find_unfinished(tmp_path / "nowhere", fingerprint) is None
    now = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: now | {"python": "4"})
    assert find_unfinished(tmp_path, fingerprint) is None
