"""What is kept of runs."""

from pathlib import Path

import pytest
from measured_arms import make_arm, repeated
from measured_noise import possible_run, save

from picbench.compare.baseline import BaselineArm, make_baseline, with_relative_times
from picbench.errors import ConfigError
from picbench.store.reader import Run


def test_times_of_several_runs_are_geometric_means() -> None:
    runs = [possible_run(seed, size=64) for seed in (1, 2)]
    saved = save(runs).arms["full"]
    pairs = zip(*(run["full"].times["ttft_ms"] for run in runs), strict=True)
    expected = [(a * b) ** 0.5 for a, b in pairs if a and b]
    assert saved.times["ttft_ms"] == pytest.approx(expected, abs=1e-3)
    assert 0 < saved.drift["ttft_ms"] < 0.1


def test_a_run_that_is_named_twice_would_say_that_nothing_drifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [Run(path, {"status": "complete"}) for path in (Path("one"), tmp_path / "one")]
    with pytest.raises(ConfigError, match="one is named twice"):
        make_baseline(runs)


def test_one_run_tells_nothing_of_drift() -> None:
    assert save([possible_run(1)]).arms["full"].drift == {}


def test_an_arm_comes_back_as_comparisons_take_it() -> None:
    arm = with_relative_times(possible_run(1, size=64))["mepic"]
    saved = save([possible_run(1, size=64)]).arms["mepic"]
    assert saved.clusters is None, "every sample is its own"
    back = saved.measured("mepic")
    assert back.clusters == arm.samples
    assert back.scores == arm.scores
    assert back.counters == arm.counters
    assert back.times["ttft_vs_full"] == pytest.approx(arm.times["ttft_vs_full"], abs=1e-6)


def test_repeats_come_back_as_the_same_requests() -> None:
    arm = repeated(make_arm(size=20), 2)
    once = BaselineArm.of([make_arm()])
    assert (once.places, once.repeats) == (None, None), "as files have it that are older"
    back = BaselineArm.of([arm]).measured("full")
    assert (back.places, back.repeats) == (arm.places, (0,) * 20 + (1,) * 20)


def test_a_file_from_before_repeats_were_kept_has_one() -> None:
    saved = BaselineArm.of([repeated(make_arm(size=20), 2)]).model_dump(mode="json")
    del saved["repeats"]
    arm = BaselineArm.model_validate(saved).measured("full")
    assert arm.repeats == (0,) * 40
    assert arm.places == (*range(20), *range(20))


def test_files_of_one_repeat_are_as_they_were() -> None:
    """Older versions refuse fields that they do not know."""
    assert "repeats" not in BaselineArm.of([make_arm()]).model_dump(mode="json")


def test_relative_times_need_full() -> None:
    arms = possible_run(1, size=64)
    assert "ttft_vs_full" in with_relative_times(arms)["mepic"].times
    assert "ttft_vs_full" not in with_relative_times(arms)["full"].times
    assert "ttft_vs_full" not in with_relative_times({"mepic": arms["mepic"]})["mepic"].times
