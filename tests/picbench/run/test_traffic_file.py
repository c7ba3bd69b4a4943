"""From `picbench traffic` to the requests of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from picbench.cli import main
from picbench.errors import ConfigError
from picbench.run.traffic_file import TrafficWriter, parse_traffic, replay_of
from picbench.run.workload import load_workload
from picbench.settings import parse_config
from picbench.workloads import models

FLAGS = ("--dataset", "synthetic", "--requests", "6", "--pool", "8", "--chunk-tokens", "20")


def traffic(path: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ("traffic", "--output", str(path), *FLAGS, *flags))


def replay(path: Path, **values: Any) -> Any:
    return load_workload(parse_config({"algo": ("full",), "requests": str(path), **values}))


def test_what_was_drawn_is_what_is_run(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    result = traffic(path, "--chunks", "2-3", "--rate", "4", "--cached", "0.5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(path)
    assert "requests: 6" in result.stdout
    workload = replay(path)
    assert len(workload.samples) == len(workload.arrivals) == 6
    assert workload.synthetic
    assert workload.requests == json.loads(path.read_text().splitlines()[0])["sha256"]
    assert workload.grader.score("anything", ("yes",)) is None
    chunks = {segment.tokens for sample in workload.samples for segment in sample.chunks}
    for sample in workload.preload:
        assert sample.segments[0].kind == "text"
        assert sample.chunks[0].tokens in chunks


def test_the_same_settings_write_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        traffic(tmp_path / name, "--seed", "5", "--zipf", "1")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    traffic(tmp_path / "c", "--seed", "6", "--zipf", "1")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--chunks", "many"), "--chunks 'many' is no number of chunks"),
        (("--chunks", "9"), "--chunks 9: there are 8 chunks"),
        (("--zipf", "-1"), "--zipf -1.0 is not possible"),
        (("--preset", "mepic-squat"), "did you mean 'mepic-squad'?"),
        (("--dataset", "samsum"), "--dataset samsum"),
        (("--speed", "2"), "--speed is for traces (name one with --trace)"),
        (("--longest", "9"), "--longest is for traces (name one with --trace)"),
        (("--chunks", "9-8"), "--chunks 9-8 is not possible"),
        (("--max-tokens", "0"), "--max-tokens 0"),
        (("--max-tokens", "-7"), "--max-tokens -7"),
        (("--arrivals", "uniform"), "--arrivals: there is no rate (give a --rate)"),
        (("--data", "nowhere"), "--data nowhere: synthetic has random tokens"),
        (("--columns", "squad"), "--columns squad: generated rows have no other fields"),
        (("--dataset", "musique", "--columns", "squad"), "--columns squad: generated rows"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    done = traffic(tmp_path / "requests.jsonl", *flags)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dataset", ["synthetic", "musique"])
def test_files_from_one_writer_are_those_of_writers_of_their_own(
    tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = models.load_tokenizer
    monkeypatch.setattr(models, "load_tokenizer", lambda m: (loaded.append(m.name), load(m))[1])
    writer, model = TrafficWriter(), models.resolve("testbed")
    for seed, pool in ((1, 16), (2, 16), (2, 24)):
        settings = {"dataset": dataset, "seed": seed, "pool": pool, "chunks": "8", "requests": 4}
        config = parse_traffic(settings)
        one = writer.write(tmp_path / "one", config, model)
        assert loaded == ["testbed"]
        assert one == TrafficWriter().write(tmp_path / "other", config, model)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
        del loaded[1:]


def test_flags_of_a_run_shorten_and_pace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    traffic(path, "--rate", "4")
    short = replay(path, limit=2, max_tokens=3)
    assert [sample.max_tokens for sample in short.samples] == [3, 3]
    assert short.arrivals == replay(path).arrivals[:2]
    paced = replay(path, rate=2.0, arrivals="uniform")
    assert paced.arrivals == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    traffic(path)
    assert replay(path).arrivals is None
    with pytest.raises(ConfigError, match=r"requests.jsonl:\d+: \d+ tokens of prompt and reply"):
        replay(path, context=32)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "either a data set or a request file"),
        ({"dataset": "musique", "requests": "r.jsonl"}, "either a data set or a request file"),
        ({"dataset": "hotpotqa", "arrivals": "uniform"}, "`arrivals` uniform: there is no rate"),
        ({"requests": "r.jsonl", "data": "rows.jsonl"}, "`data` and `requests`: requests are"),
        ({"requests": "r.jsonl", "columns": "squad"}, "`columns` and `requests`: requests are"),
        ({"requests": "r.jsonl", "prompts": "p.json"}, "`prompts` and `requests`: requests are"),
        ({"requests": "r.jsonl", "grid": "1-2:3x4"}, "`grid` and `requests`: requests are"),
        ({"requests": "r.jsonl", "chat": "on"}, "`chat` and `requests`: requests are"),
        ({"requests": "r.jsonl", "drop": "lead"}, "`drop` and `requests`: requests are"),
    ],
)
def test_a_run_takes_a_data_set_or_a_file_with_its_own_settings(
    values: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_workload(parse_config({"algo": ("full",), **values}))


def test_rows_of_a_data_set_can_arrive_on_their_own() -> None:
    values = {"algo": ("full",), "dataset": "hotpotqa", "limit": 3, "rate": 2.0, "seed": 4}
    first, again = (load_workload(parse_config(values)) for _ in range(2))
    assert first.arrivals is not None
    assert len(first.arrivals) == 3
    assert first.arrivals == again.arrivals


def test_presets_can_be_changed_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ("traffic", "--out", str(path), "--preset", "mepic-emrqa", "--requests", "5")
    assert CliRunner().invoke(main, arguments).exit_code == 0
    header = json.loads(path.read_text().splitlines()[0])
    assert header["settings"]["traffic"]["requests"] == 5
    assert header["settings"]["source"]["dataset"] == "musique"


def test_a_trace_takes_no_settings_of_drawn_traffic() -> None:
    assert replay_of(parse_traffic({"trace": "d", "speed": 2.0, "requests": 5})).speed == 2.0
    with pytest.raises(ConfigError, match="`trace` and `zipf`"):
        replay_of(parse_traffic({"trace": "d", "zipf": 1.0}))
