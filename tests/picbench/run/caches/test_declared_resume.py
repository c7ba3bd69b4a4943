"""Runs with declared caches that were stopped end as if they had not been."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import (
    FakeServer,
    Harness,
    PicEngine,
    make_reusing_samples,
    make_sample,
    run_fakes,
)

from picbench.engines.config import EngineConfig
from picbench.engines.request import Request
from picbench.errors import EngineError
from picbench.store import provenance
from picbench.store.reader import read_run
from picbench.store.records import GroupResult
from picbench.store.writer import MANIFEST, SUMMARY
from picbench.workloads.sample import Sample

ARMS = ("full", "prefix", "mepic")


@pytest.fixture(autouse=True)
def quick_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: dict(found))


class StoppedError(Exception):
    """What stops a run."""


@dataclass
class StoppingServer(FakeServer):
    """Stops the run before some group, counted over all arms."""

    stops_at: int = 10**9

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        if sum(" " not in entry for entry in self.order) == self.stops_at:
            raise StoppedError
        return super().run(requests, concurrency, arrivals)


@dataclass
class StoppingHarness(Harness):
    samples: Sequence[Sample] = field(default_factory=lambda: make_reusing_samples(8))
    capacity: int = 5
    stops_at: int = 10**9

    def launch(self, name: str, config: EngineConfig, log: Path) -> FakeServer:
        super().launch(name, config, log)
        engine = PicEngine(name, capacity=self.capacity)
        self.servers[name] = StoppingServer(
            name, config, self.order, engine, stops_at=self.stops_at
        )
        return self.servers[name]


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run measured but for times."""
    run = read_run(folder)
    arms = json.loads((folder / SUMMARY).read_text())["arms"]
    return {
        "status": run.manifest["status"],
        "rows": [
            (row.arm, row.sample, row.round, row.tokens, row.expected_reuse) for row in run.rows
        ],
        "cache": {name: arm["cache"] for name, arm in arms.items()},
    }


@pytest.mark.parametrize("state", ["cold", "warm", "steady"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_stopped_run_ends_as_if_it_had_not_been(
    state: str, concurrency: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"cache": state, "concurrency": concurrency}
    samples = make_reusing_samples(15)
    if state == "steady":
        samples = [make_sample(number) for number in range(200)]
    run_fakes(StoppingHarness(samples), tmp_path / "whole", *ARMS, **settings)
    for stop in (4, 7):
        folder = tmp_path / f"run-{stop}"
        with pytest.raises(StoppedError):
            run_fakes(StoppingHarness(samples, stops_at=stop), folder, *ARMS, **settings)
        assert read_run(folder).manifest["status"] == "failed"
        again = StoppingHarness(samples)
        run_fakes(again, folder, *ARMS, **settings)
        assert outcome(folder) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("state", [None, "cold", "warm"])
def test_a_run_that_is_stopped_in_a_later_repeat_goes_on_there(
    state: str | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"cache": state, "concurrency": 1, "repeats": 3}
    samples = make_reusing_samples(4)
    run_fakes(StoppingHarness(samples), tmp_path / "whole", *ARMS, **settings)
    # Twelve groups are a repeat; warm caches are filled before each.
    for stop in (12, 17, 20):
        folder = tmp_path / f"run-{stop}"
        with pytest.raises(StoppedError):
            run_fakes(StoppingHarness(samples, stops_at=stop), folder, *ARMS, **settings)
        run_fakes(StoppingHarness(samples), folder, *ARMS, **settings)
        assert outcome(folder) == outcome(tmp_path / "whole")
        replayed = read_run(folder).manifest["attempts"][1]["replayed"]
        assert replayed < 12


def test_cold_requests_are_not_served_again(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        run_fakes(StoppingHarness(stops_at=7), tmp_path, *ARMS, cache="cold", concurrency=1)
    harness = StoppingHarness()
    run_fakes(harness, tmp_path, *ARMS, cache="cold", concurrency=1)
    assert sum(" " not in entry for entry in harness.order) == 8 * len(ARMS) - 7
    attempts = json.loads((tmp_path / MANIFEST).read_text())["attempts"]
    assert [(attempt["done"], attempt["replayed"]) for attempt in attempts] == [(0, 0), (7, 0)]


def test_an_arm_whose_cache_cannot_be_dropped_is_lost(tmp_path: Path) -> None:
    class Stuck(PicEngine):
        def reset(self) -> None:
            if any(call.startswith("generate") for call in self.calls):
                raise EngineError("requests hold blocks")

    harness = Harness(make_reusing_samples(3), engines={"mepic": Stuck("mepic")})
    run_fakes(harness, tmp_path, "full", "mepic", cache="cold", concurrency=1)
    assert read_run(tmp_path).summary["mepic"].failed == 2
    assert read_run(tmp_path).summary["full"].failed == 0
