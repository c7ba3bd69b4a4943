"""Baselines: what is kept of runs, and the files."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from full_disk import largest_file
from measured_arms import make_arm, repeated
from measured_noise import FILE, measured, possible_run, save

from picbench.compare.arm import MeasuredArm
from picbench.compare.baseline import (
    Baseline,
    baseline_path,
    list_baselines,
    make_baseline,
    merge_arms,
    read_baseline,
    usual_thresholds,
    with_relative_times,
    write_baseline,
)
from picbench.errors import ConfigError, InvalidRun
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


def test_exact_answers_are_asked_for_where_all_repeats_agree() -> None:
    """Of one answer to a prompt nobody knows if it repeats, nor of runs in other arithmetic."""
    once = make_arm(size=20)
    twice = repeated(once, 2)
    changed = replace(once, outputs=("other", *once.outputs[1:]))
    for runs, alike, outputs in (
        ([once], True, None),
        ([twice], True, "exact"),
        ([once, once], True, "exact"),
        ([once, once], False, None),
        ([once, changed], True, None),
    ):
        found = usual_thresholds([{"full": arm} for arm in runs], alike=alike)
        assert found.outputs == outputs


def stored(arm: MeasuredArm) -> tuple[dict[str, Any], MeasuredArm]:
    """An arm as a file has it, and as it comes back."""
    baseline = save([{"full": arm}])
    values = baseline.model_dump(mode="json")
    return values["arms"]["full"], Baseline.model_validate(values).arms["full"]


def test_an_arm_comes_back_as_comparisons_take_it() -> None:
    for arm in (possible_run(1, size=64)["full"], repeated(make_arm(size=20), 2)):
        values, back = stored(arm)
        assert back == merge_arms([arm])
        assert ("repeats" in values) == ("places" in values) == (len(arm.samples) == 40), (
            "older versions refuse fields that they do not know"
        )
    values, _ = stored(possible_run(1, size=64)["full"])
    assert values["clusters"] is None, "every sample is its own"


def test_a_file_from_before_repeats_were_kept_has_one() -> None:
    values = save([{"full": repeated(make_arm(size=20), 2)}]).model_dump(mode="json")
    del values["arms"]["full"]["repeats"]
    arm = Baseline.model_validate(values).arms["full"]
    assert arm.repeats == (0,) * 40
    assert arm.places == (*range(20), *range(20))


def test_relative_times_need_full() -> None:
    arms = possible_run(1, size=64)
    assert "ttft_vs_full" in with_relative_times(arms)["mepic"].times
    assert "ttft_vs_full" not in with_relative_times(arms)["full"].times
    assert "ttft_vs_full" not in with_relative_times({"mepic": arms["mepic"]})["mepic"].times


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["b.json", "b.yaml", "deep/b.yml"])
def test_a_baseline_comes_back(name: str) -> None:
    write_baseline(Path(name), measured())
    assert read_baseline(name) == measured()


def test_the_stored_file_is_as_it_would_be_written() -> None:
    write_baseline(Path("again.json"), measured())
    assert Path("again.json").read_text() == FILE.read_text()


def test_a_column_has_a_line() -> None:
    write_baseline(Path("b.json"), measured())
    lines = Path("b.json").read_text().splitlines()
    assert sum('"scores": [' in line for line in lines) == len(measured().arms)
    assert '      "margin": 0.01' in lines


def test_names_are_files_in_a_folder() -> None:
    assert baseline_path("musique") == Path("baselines/musique.json")
    assert baseline_path("x.yaml") == Path("x.yaml")
    write_baseline(Path("baselines/other.yaml"), measured())
    assert baseline_path("other") == Path("baselines/other.yaml")
    assert list(list_baselines()) == [("other", Path("baselines/other.yaml"))]
    assert read_baseline("other").runs == 1


def test_an_unknown_name_gets_a_suggestion() -> None:
    write_baseline(Path("baselines/musique.json"), measured())
    with pytest.raises(ConfigError, match="did you mean 'musique'"):
        read_baseline("musik")


def test_a_file_of_another_name_is_read_and_what_it_is_said() -> None:
    Path("notes.txt").write_text("{}")
    with pytest.raises(ConfigError, match=r"`baseline` notes\.txt: is no baseline"):
        read_baseline("notes.txt")
    assert baseline_path("notes.txt") == Path("baselines/notes.txt.json")


def change(**changes: object) -> None:
    values = {**json.loads(FILE.read_text()), **changes}
    Path("b.json").write_text(json.dumps(values))


def test_where_there_is_none_the_command_that_makes_one_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_baseline("usual")
    assert caught.value.hint == "picbench baseline save makes one"


def test_a_wrong_field_is_named() -> None:
    change(thresholds={"score": {"margin": 0.01, "margins": 1}})
    with pytest.raises(ConfigError, match=r"thresholds\.score\.margins: Extra inputs"):
        read_baseline("b.json")
    change(thresholds={"ttft_ms": {"ratio": 0.9}})
    with pytest.raises(ConfigError, match=r"thresholds\.ttft_ms\.ratio: Input should be greater"):
        read_baseline("b.json")
    change(thresholds={"counters": {"blocks": 0}})
    with pytest.raises(ConfigError, match="no such count: blocks"):
        read_baseline("b.json")


def test_a_baseline_of_no_run_is_refused() -> None:
    """Noise of several runs is divided by their number."""
    change(runs=0)
    with pytest.raises(ConfigError, match="runs: Input should be greater than or equal to 1"):
        read_baseline("b.json")


def test_editors_may_mark_a_file_as_utf_8() -> None:
    Path("b.json").write_text(FILE.read_text(), encoding="utf-8-sig")
    assert read_baseline("b.json") == measured()


def test_another_schema_is_refused_with_a_hint() -> None:
    change(baseline=2)
    with pytest.raises(InvalidRun, match="schema 2, this version reads 1") as raised:
        read_baseline("b.json")
    assert raised.value.exit_code == 3
    assert raised.value.hint == "save it again"


@pytest.mark.parametrize("text", ["{", "[]", "{}", "a: [", "just text"])
def test_what_is_no_baseline_is_said(text: str) -> None:
    Path("b.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"`baseline` b\.yaml"):
        read_baseline("b.yaml")


def test_thresholds_can_be_edited_by_hand() -> None:
    write_baseline(Path("b.yaml"), measured())
    values = yaml.safe_load(Path("b.yaml").read_text())
    values["thresholds"] = {"score": {"margin": 0.05}, "counters": {"peak_blocks": 0.02}}
    Path("b.yaml").write_text(yaml.safe_dump(values))
    found = read_baseline("b.yaml")
    assert isinstance(found, Baseline)
    assert found.thresholds.times == {}
    assert found.thresholds.counters == {"peak_blocks": 0.02}


def test_a_disk_that_is_full_keeps_the_old_file() -> None:
    write_baseline(Path("b.json"), measured())
    before = Path("b.json").read_bytes()
    with largest_file(10), pytest.raises(ConfigError, match=r"b\.json: File too large"):
        write_baseline(Path("b.json"), measured())
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == {"b.json": before}


def test_what_is_no_regular_file_is_not_replaced() -> None:
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="pipe: not a regular file"):
        write_baseline(Path("pipe"), measured())
    assert Path("pipe").is_fifo()


def test_columns_that_cannot_be_paired_are_named() -> None:
    values = measured().model_dump(mode="json")
    name, arm = next(iter(values["arms"].items()))
    few = {**arm, "counters": {**arm["counters"], "linked_tokens": [1]}}
    change(arms={name: few})
    with pytest.raises(ConfigError, match=rf"arms\.{name}: .*counters\.linked_tokens has 1 values"):
        read_baseline("b.json")
    # `json` writes and reads NaN, which no other score differs from.
    change(arms={name: {**arm, "scores": [float("nan")] * len(arm["samples"])}})
    with pytest.raises(ConfigError, match=rf"arms\.{name}\.scores\.0: .*finite"):
        read_baseline("b.json")
    change(arms={})
    with pytest.raises(ConfigError, match=r"arms: .*at least 1 item"):
        read_baseline("b.json")
