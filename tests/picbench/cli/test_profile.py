"""`picbench profile` from a trace to its advice."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from picbench.cli import main
from picbench.engines.algorithms import names
from picbench.profile.predictor import PACKAGED
from picbench.profile.profile import read_answers
from picbench.workloads.traffic.ragpulse import LENGTHS, TRACE


def trace(path: Path, chunks: list[list[str]], output: int = 8) -> Path:
    """Requests with these chunks of 200 tokens each, a second apart."""
    path.write_text(
        "".join(
            json.dumps(
                {
                    "arrival": number,
                    "output": output,
                    "parts": [
                        {"id": "head", "tokens": 20},
                        *({"chunk": name, "tokens": 200} for name in names),
                        {"tokens": 10},
                    ],
                }
            )
            + "\n"
            for number, names in enumerate(chunks)
        )
    )
    return path


def shared(requests: int, chunks: int) -> list[list[str]]:
    source = Random(3)
    return [[f"d{n}" for n in source.sample(range(12), chunks)] for _ in range(requests)]


def run(*words: str) -> str:
    done = CliRunner().invoke(main, ["profile", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("style", ["text", "json", "markdown"])
def test_every_output_says_that_it_is_a_simulation(tmp_path: Path, style: str) -> None:
    path = trace(tmp_path / "t.jsonl", shared(20, 6))
    assert "simulation" in run(str(path), "--format", style, "--grid", "none")


def test_chunks_that_recur_are_worth_it(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(60, 6))
    found = profiled(path, "--pool", "300")
    assert found["advice"]["worth"] == "yes"
    assert found["advice"]["arm"] == "mepic"
    mepic = found["arms"]["mepic"]
    # 12 chunks of 13 blocks each fit the pool together with a request.
    assert mepic["unbounded"]["compiled"] == 12 * 200
    assert mepic["limited"]["compiled"] == mepic["unbounded"]["compiled"]
    small = profiled(path, "--pool", "110")["arms"]["mepic"]["limited"]
    assert small["compiled"] > mepic["limited"]["compiled"]
    none = profiled(path, "--pool", "80")
    assert none["arms"]["mepic"]["limited"]["refused"] == 60
    assert none["advice"]["worth"] == "unknown"
    assert "80 blocks is too small for 60 of 60 requests under" in none["advice"]["line"]
    assert profiled(path, "--pool", "70")["arms"]["full"]["limited"]["refused"] == 60


def test_a_pool_without_room_for_a_chunk_and_what_is_left_of_it_is_one_line(
    tmp_path: Path,
) -> None:
    """Blocks of chunks that are left over are held while the chunks are compiled anew."""
    length = {"a": 32, "b": 100, "c": 32, "d": 32}
    lines = [
        {
            "output": 8,
            "parts": [{"chunk": c, "tokens": length[c]} for c in chunks] + [{"tokens": 10}],
        }
        for chunks in ("dba", "ba")
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--grid", "none", "--pool", "14", "--algo", "prefix,epic:k=16:copy=shared")
    done = CliRunner().invoke(main, ["profile", str(path), *words])
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert "--pool is too small to compile the chunks of" in line
    assert line.endswith("(raise it, or leave that algorithm out)")


def test_more_requests_at_a_time_than_the_pool_holds_are_said(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(20, 6))
    flags = (
        str(path),
        "--algo",
        "full,mepic",
        "--grid",
        "cpu-testbed",
        "--pool",
        "300",
        "--running",
    )
    assert "16 requests at a time hold more than the pool" in run(*flags, "16")
    assert "hold more than the pool" not in run(*flags, "1")


def test_an_unknown_grid_is_answered_with_those_there_are(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(2, 2))
    done = CliRunner().invoke(main, ["profile", str(path), "--grid", "h100"])
    assert done.exit_code == 2
    assert "one of the package's: cpu-testbed, h200-llama-3.1-8b" in done.stderr


def test_times_may_begin_anywhere(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(5, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["arrival"] += 1.7e9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert profiled(path)["traffic"]["rate"] == 1
    del lines[2]["arrival"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(main, ["profile", str(path)])
    assert done.exit_code == 2
    assert "t.jsonl:3: field 'arrival': some requests have a time and some have none" in done.output


def test_chunks_that_never_recur_lose(tmp_path: Path) -> None:
    alone = [[f"d{number}-{n}" for n in range(6)] for number in range(20)]
    advice = profiled(trace(tmp_path / "t.jsonl", alone))["advice"]
    assert advice["worth"] in ("no", "no difference")
    assert advice["arm"] in ("full", "prefix", "reorder")
    assert "0% of chunk tokens recur" in advice["line"]


def profiled(path: Path, *words: str) -> Any:
    return json.loads(run(str(path), "--format", "json", "--grid", "none", *words))


def test_a_grid_predicts_and_says_how_well(tmp_path: Path) -> None:
    # The grid has replies of four tokens, and prompts of 144 to 816.
    path = trace(tmp_path / "t.jsonl", shared(12, 3), output=4)
    text = run(str(path), "--grid", "cpu-testbed")
    assert "Leave-one-out error of TTFT: median" in text
    assert "shared" in text  # The machine was: the caveat of the grid.
    assert "Outside" not in text
    assert "extrapolated" in run(
        str(trace(tmp_path / "long.jsonl", shared(40, 12))), "--grid", "cpu-testbed"
    )
    found = json.loads(run(str(path), "--grid", "cpu-testbed", "--format", "json"))
    times = {arm: found["arms"][arm]["predicted"] for arm in ("full", "mepic")}
    assert times["mepic"]["ttft_s"] < times["full"]["ttft_s"]
    assert times["mepic"]["inside"]
    for figure in ("ttft_s", "requests_s"):
        low, high = times["mepic"][f"{figure}_range"]
        assert low < times["mepic"][figure] < high
    low, high = times["mepic"]["ttft_s_range"]
    assert f"({low * 1e3:,.1f}-{high * 1e3:,.1f})" in text


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(5, 3))
    run(str(path), "--grid", "none", "--figure", str(tmp_path / "computed"))
    assert "simulation" in (tmp_path / "computed.svg").read_text()
    assert (tmp_path / "computed.png").stat().st_size > 5000
    run(str(path), "--grid", "none", "--figure", str(tmp_path / "named.png"))
    assert {found.name for found in tmp_path.glob("named*")} == {"named.png", "named.svg"}


def test_a_figure_that_cannot_be_is_refused_before_the_trace_is_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["profile", "nowhere", "--figure", str(tmp_path)])
    assert done.exit_code == 2
    assert "--figure" in done.stderr


def test_every_arm_of_the_registry_is_offered(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(6, 2))
    arms = ["mepic:anchor=head:context=document", "epic:k=0", "mepic:pad=paper", *names()]
    found = profiled(path, "--algo", ",".join(arms))["arms"]
    assert len(found) == len(set(arms))
    assert all(arm["unbounded"]["requests"] == 6 for arm in found.values())
    assert "pick tokens while a request runs" in run(str(path), "--algo", "cacheblend")
    done = CliRunner().invoke(main, ["profile", str(path), "--algo", "kvlink:n=5:first=-2"])
    assert done.exit_code == 2


def articles(path: Path) -> Path:
    """Two chunks of one article in any order, the second after what precedes it there."""
    second = {"chunk": "b", "tokens": 320, "before": {"tokens": 160}}
    head, first, tail = {"id": "head", "tokens": 48}, {"chunk": "a", "tokens": 160}, {"tokens": 20}
    lines = [{"parts": [head, first, second, tail]}, {"parts": [head, second, first, tail]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 8))
    return path


def test_an_arm_that_keeps_answers_is_advised_and_its_loss_shown(tmp_path: Path) -> None:
    keeping = "mepic:anchor=head:context=document"
    found = profiled(articles(tmp_path / "t.jsonl"))
    assert (found["advice"]["worth"], found["advice"]["arm"]) == ("yes", keeping)
    assert "which keeps 0.99-1.00 on synthetic-testbed of full" in found["advice"]["line"]
    assert found["arms"]["mepic"]["kept"]["synthetic-testbed"]["musique"][0] == 0.628
    assert found["arms"]["reorder"]["kept"] == {}
    # 48 + 160 before the second chunk are compiled beside it, the head's 48 once in all.
    assert found["arms"][keeping]["unbounded"]["compiled"] == 48 + 160 + 160 + 320
    assert "synthetic texts" in run(str(tmp_path / "t.jsonl"))


def test_a_loss_is_said_and_an_unknown_one_not_advised(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.jsonl", shared(60, 6))
    lossy = profiled(path, "--algo", "prefix,mepic")["advice"]
    assert lossy["line"].startswith("PIC is worth it if its loss is: mepic, which keeps 0.63-1.00")
    for unknown in ("mepic:blocks=3", "mepic:anchor=head:context=document"):  # Of no document here.
        found = profiled(path, "--algo", f"prefix,{unknown}")
        assert (found["advice"]["worth"], found["advice"]["arm"]) == ("unknown", None)
        shown = " ".join(run(str(path), "--algo", f"prefix,{unknown}").split())
        assert f"Not advised, as their loss is not known here: {unknown}." in shown


def test_kept_shares_are_those_of_the_measurement() -> None:
    [packaged] = read_answers()
    path = Path(__file__).parents[3] / "results" / "testbed" / "algorithms.json"
    measured = json.loads(path.read_text())["workloads"]["testbed"]
    found = {
        arm: {name: [round(x, 3) for x in sets[arm]["kept"]] for name, sets in measured.items()}
        for arm in measured["musique"]
    }
    assert packaged.kept == found


#: What the core does without: packages of engines, of rows, of tables and figures.
ABSENT = ("torch", "vllm", "transformers", "datasets", "pyarrow", "pandas", "matplotlib")


@pytest.mark.parametrize("kind", ["lengths", "texts", "ragpulse"])
def test_the_core_alone_is_needed(tmp_path: Path, kind: str) -> None:
    path = trace(tmp_path / "t.jsonl", shared(3, 2))
    if kind == "texts":
        path.write_text(
            json.dumps({"messages": [{"role": "user", "content": "Who? " * 40}]}) + "\n"
        )
    if kind == "ragpulse":
        path.unlink()
        path = tmp_path
        fields = ("sys_prompt_id", "passage_id", "history_id", "user_input_id", "web_search_id")
        for number, (name, field) in enumerate(zip(LENGTHS, fields, strict=True)):
            (path / name).write_text(json.dumps({field: number, "token_length": 50}) + "\n")
        line = {"timestamp": 1, "output_length": 2, "hash_ids": {"passages_ids": [1]}}
        (path / TRACE).write_text(json.dumps(line | {"session_id": "s"}) + "\n")
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from picbench.cli import main\n"
        f"main(['profile', {str(path)!r}], standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PIC" in done.stdout


def chats(path: Path, count: int = 12) -> Path:
    """Documents in any order in messages that mark none."""
    source = Random(4)
    texts = [" ".join(f"w{source.randint(0, 999)}" for _ in range(90)) for _ in range(5)]
    lines = []
    for number in range(count):
        content = " ".join(source.sample(texts, 3)) + f" Question {number}?"
        lines.append({"messages": [{"role": "user", "content": content}]})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_log_ends_in_a_decision_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = chats(Path("log.jsonl"))
    shown = run(str(path), "--pool", "4000")
    assert max(map(len, shown.splitlines())) <= 80
    blocks = shown.split("\n\n")
    assert blocks[1].startswith("PIC is worth it if some answers may change: mepic computes")
    assert "than prefix caching" in " ".join(blocks[1].split())
    assert "full recompute's score" in " ".join(blocks[1].split())
    assert blocks[2].startswith("computed tokens   prefix")
    assert "█" in blocks[2]
    assert "first token, ms" in blocks[2]
    assert "answers kept" in blocks[2]
    assert blocks[3].startswith("Seen before at another place: ")
    assert "reordered documents" in blocks[3]
    assert "a tier would save it" in blocks[3]
    assert blocks[4].startswith("arm  ")
    assert run("--requests", str(path), "--pool", "4000") == shown


def test_what_a_trace_does_not_show_is_said_and_not_decided(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(line)}\n" * 3)
    found = profiled(path)
    assert (found["advice"]["worth"], found["sees"]) == ("unknown", "prefixes")
    said = found["advice"]["sentence"]
    assert said.startswith("Prefix caching saves 66% of prompt tokens; whether PIC would save more")
    assert "ids are chained: nothing beyond prefixes can be seen" in said
    assert "Seen before at another place" not in run(str(path), "--grid", "none")
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    assert "only lengths are known" in profiled(path)["advice"]["sentence"]


def test_progress_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picbench.cli.inspect._EVERY", 0.0)
    path = chats(tmp_path / "log.jsonl")
    done = CliRunner().invoke(main, ["profile", str(path), "--grid", "none", "--format", "json"])
    assert json.loads(done.stdout)["simulation"]
    assert "picbench: 12 requests read\n" in done.stderr
    assert "picbench: 12 requests counted\n" in done.stderr


def test_one_file_is_named(tmp_path: Path) -> None:
    for words in ((), ("a.jsonl", "--requests", "b.jsonl")):
        done = CliRunner().invoke(main, ["profile", *words])
        assert done.exit_code == 2
        assert "name one file of requests: picbench profile FILE" in done.stderr


def test_a_calibration_changes_times_and_is_named(tmp_path: Path) -> None:
    path = str(trace(tmp_path / "t.jsonl", shared(12, 3), output=4))
    cells = json.loads(PACKAGED["cpu-testbed"].read_bytes())
    for cell in cells["cells"]:
        for arm in cell["arms"].values():
            arm["ttft_s"] *= 3
            arm["requests_s"] /= 2
    cells["facts"]["hardware"] = "a slower one"
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(cells))
    words = (path, "--grid", "cpu-testbed", "--format", "json")
    grids, there = (json.loads(run(*words, *more)) for more in ((), ("--calibration", str(slower))))
    for name, arm in there["arms"].items():
        found, before = arm["predicted"], grids["arms"][name]["predicted"]
        assert found["ttft_s"] == pytest.approx(3 * before["ttft_s"], rel=0.1)
        assert found["requests_s"] == pytest.approx(before["requests_s"] / 2, rel=0.1)
        assert found["kv_gib"] == before["kv_gib"]
    assert grids["calibration"] is None
    assert "a slower one" in there["calibration"]
    said = run(*words[:-2], "--calibration", str(slower))
    assert "At the speed of: testbed model, float32, a slower one" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--grid", "none", "--calibration", str(PACKAGED["cpu-testbed"])),
            "there is no grid to calibrate",
        ),
        (("--calibration", "nowhere.json"), "File 'nowhere.json' does not exist"),
        (
            ("--calibration", str(PACKAGED["cpu-testbed"])),
            "--calibration: its model is testbed model, the grid's is shape:llama-3.1-8b",
        ),
    ],
)
def test_a_calibration_that_fits_no_grid_is_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    path = str(trace(tmp_path / "t.jsonl", shared(4, 2)))
    done = CliRunner().invoke(main, ["profile", path, *words])
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert said in line
