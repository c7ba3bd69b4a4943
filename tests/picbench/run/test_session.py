"""Several runs on one set of engines."""

import io
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import Harness, make_sample, no_gpu

from picbench.errors import ConfigError, EngineError
from picbench.run.job import prepare
from picbench.run.schedule import Progress
from picbench.run.session import execute_all
from picbench.settings import parse_config
from picbench.store.reader import read_run


def run_all(harness: Harness, folder: Path, *blocks: int) -> list[str]:
    """Names of the runs that ended; each has a pool of its own size."""
    jobs, progress = [], Progress(99, io.StringIO())
    for name, count in zip("ab", blocks, strict=True):
        values = {"algo": ("full", "mepic"), "dataset": "fake", "kv_blocks": count}
        config = parse_config(values | {"output": str(folder / name)})
        jobs.append(prepare(config, harness.load, no_gpu))
    done = execute_all(jobs, harness.launch, progress, folder / "logs", lambda job: True)
    return [job.output.name for job in done]


def make_harness(**settings: Any) -> Harness:
    return Harness([make_sample(n) for n in range(3)], **settings)


def test_engines_start_once_and_every_run_begins_cold(tmp_path: Path) -> None:
    harness = make_harness()
    assert run_all(harness, tmp_path, 50, 50) == ["a", "b"]
    assert harness.order.count("launch mepic") == 1
    assert harness.order.count("reset mepic") == 2
    assert harness.order.index("reset mepic") < harness.order.index("mepic")
    assert harness.servers["mepic"].state == "closed"
    assert {read_run(tmp_path / name).manifest["status"] for name in "ab"} == {"complete"}
    assert (tmp_path / "logs" / "mepic.log").exists()


def test_runs_that_need_other_engines_are_refused(tmp_path: Path) -> None:
    harness = make_harness()
    with pytest.raises(ConfigError, match="the same arms, model, pool and context"):
        run_all(harness, tmp_path, 50, 60)
    assert harness.order == []


def test_a_failed_request_ends_the_remaining_runs(tmp_path: Path) -> None:
    harness = make_harness(dies_at={"mepic": 0})
    with pytest.raises(EngineError, match="3 requests failed"):
        run_all(harness, tmp_path, 50, 50)
    assert not (tmp_path / "b").exists()
    assert {server.state for server in harness.servers.values()} == {"killed"}
