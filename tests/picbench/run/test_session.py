"""Several runs on one set of engines."""

import io
import json
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, no_gpu

from picbench.errors import ConfigError, EngineError
from picbench.run.job import Job, prepare
from picbench.run.schedule import Progress
from picbench.run.session import execute_all
from picbench.settings import parse_config

SAMPLES = [make_sample(n) for n in range(3)]


def job(harness: Harness, output: Path, **flags: object) -> Job:
    values = {"algo": ("full", "mepic"), "dataset": "fake", "kv_blocks": 50, **flags}
    return prepare(parse_config({**values, "output": str(output)}), harness.load, no_gpu)


def progress() -> Progress:
    return Progress(99, io.StringIO())


def test_engines_start_once_and_every_run_begins_cold(tmp_path: Path) -> None:
    harness = Harness(SAMPLES)
    jobs = [job(harness, tmp_path / name) for name in "ab"]
    done = list(execute_all(jobs, harness.launch, progress(), tmp_path / "logs", lambda job: True))
    assert [job.output.name for job in done] == ["a", "b"]
    assert harness.order.count("launch mepic") == 1
    assert harness.order.count("reset mepic") == 2
    assert harness.order.index("reset mepic") < harness.order.index("mepic")
    assert harness.servers["mepic"].state == "closed"
    for name in "ab":
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["status"] == "complete"
    assert (tmp_path / "logs" / "mepic.log").exists()


def test_runs_that_need_other_engines_are_refused(tmp_path: Path) -> None:
    harness = Harness(SAMPLES)
    jobs = [job(harness, tmp_path / "a"), job(harness, tmp_path / "b", kv_blocks=60)]
    with pytest.raises(ConfigError, match="the same arms, model, pool and context"):
        list(execute_all(jobs, harness.launch, progress(), tmp_path / "logs", lambda job: True))
    assert harness.order == []


def test_a_failed_request_ends_the_remaining_runs(tmp_path: Path) -> None:
    harness = Harness(SAMPLES, dies_at={"mepic": 0})
    jobs = [job(harness, tmp_path / name) for name in "ab"]
    with pytest.raises(EngineError, match="3 requests failed"):
        list(execute_all(jobs, harness.launch, progress(), tmp_path / "logs", lambda job: True))
    assert not (tmp_path / "b").exists()
    assert {server.state for server in harness.servers.values()} == {"killed"}
