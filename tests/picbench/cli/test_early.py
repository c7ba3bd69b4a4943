"""What can be known to be wrong is one line that names the flag, before an engine starts."""

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from picbench.cli import main

HUGE = "99999999999999999999"

RUN = "run --dataset musique --limit 2 --algo mepic"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The line with which a command is refused, after nothing but progress of a run."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("folder").mkdir()
    Path("bytes").write_bytes(bytes(range(128, 256)))
    Path("rows.yaml").write_text(f"rows: {HUGE}\n")
    Path("list.json").write_text("[1, 2]")
    Path("chunks.jsonl").write_text('{"text": "Hello there."}\n')
    Path("trace.jsonl").write_text('{"parts": [{"chunk": "a", "tokens": 30}]}\n')
    before = {path.name for path in tmp_path.iterdir()}

    def invoke(*words: str) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2, (done.output, done.exception)
        *progress, line = done.stderr.splitlines()
        assert not progress or words[0] == "run", done.stderr
        assert {path.name for path in tmp_path.iterdir()} <= before | {"sweep.yaml", "runs"}
        return line

    return invoke


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *((f"{RUN} --tiers {tiers}", "--tiers") for tiers in ("host:99999GiB", "disk:file:1GiB")),
        *((f"{RUN} --tiers {tiers}", "--tiers") for tiers in ("disk:/proc/x:1GiB", "host:1e9TiB")),
        (f"{RUN} --tiers redis://127.0.0.1:1/0", "--tiers redis://127.0.0.1:1/0: cannot be used"),
        (f"{RUN} --tiers host:1GiB,host:2GiB", "named twice"),
        *(
            (f"{RUN} --tiers {tier}:1KiB", "no room for a KV block of")
            for tier in ("host", "disk:x")
        ),
        (f"{RUN} --tiers disk:{{tmp}}:9999TiB", "the disk has"),
        ("warm --chunks chunks.jsonl --tiers redis://127.0.0.1:1/0", "--tiers"),
        ("warm --chunks chunks.jsonl --tiers disk:file/x:1GiB", "--tiers"),
        ("measure tiers --tiers host:99999GiB", "--tiers"),
        ("measure storm --tiers disk:/proc/x:1GiB", "--tiers"),
        (f"{RUN} --kv-blocks 3", "--kv-blocks"),
        (f"{RUN} --kv-blocks 2000000000", "--kv-blocks: pools of all engines take"),
        (f"{RUN} --output file", "--output"),
        (f"{RUN} --output file/below", "--output"),
        ("selftest --limit 2 --output file", "--output"),
        ("sweep sweep.yaml --output file", "--output"),
        ("reproduce mepic --output file", "--output"),
        ("measure storm --output file", "--output"),
        ("run --dataset musique --limit 2 --algo kvlink:n=99999999999", "n=99999999999"),
        *((f"profile trace.jsonl --calibration {n}", "calib") for n in ("no", "folder", "file")),
        *((f"profile trace.jsonl --grid {name}", "list.json") for name in ("list.json",)),
        ("measure profile --grid cpu-testbed --calibration list.json", "list.json"),
        *((f"reproduce {paper} --settings bytes", "--settings") for paper in ("mepic", "accuracy")),
        ("reproduce accuracy --dry-run --settings rows.yaml", "--settings rows.yaml: rows: '99999"),
        ("reproduce mepic --dry-run --settings rows.yaml", "--settings rows.yaml: rows: '99999"),
        *((f"traffic --output o --requests {n}", "--requests") for n in (HUGE, 2**31, 2 * 10**6)),
        *((f"traffic --output o --pool {n}", "--pool") for n in (HUGE, 2 * 10**9)),
        ("traffic --output o --dataset synthetic --chunk-tokens 2000000000", "--chunk-tokens"),
        ("traffic --output o --dataset synthetic --zipf nan", "--zipf"),
        *((f"{name} folder --margin 1e-320", "--margin") for name in ("compare", "report")),
        ("measure tiers --tiers host:1MiB --seed -1", "--seed"),
        *((f"measure storm --{name} 2147483647", name) for name in ("requests", "longest")),
        ("measure algorithms alone --requests 2147483647", "--requests"),
        ("measure profile --grid none --repeats 2147483647", "--repeats"),
        *(
            (f"measure {name} --seconds -1", "--seconds")
            for name in ("kernels", "algorithms serve")
        ),
    ],
)
def test_what_cannot_be_is_said_before_an_engine_starts(
    words: str, named: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    Path("sweep.yaml").write_text("base: {algo: [full], dataset: musique}\n")
    assert named in refused(*words.format(tmp=tmp_path).split())


@pytest.mark.parametrize("setting", [f"limit: {HUGE}", "rate: .inf", "rate: .nan", "repeats: 1e99"])
@pytest.mark.parametrize("place", ["base", "grid"])
def test_a_settings_file_has_numbers_that_can_be(
    setting: str, place: str, refused: Callable[..., str]
) -> None:
    name, value = setting.split(": ")
    given = {"base": "dataset: musique", "grid": "algo: [full]"}
    given[place] += f", {name}: {value if place == 'base' else [value]}".replace("'", "")
    text = "".join(f"{key}: {{{content}}}\n" for key, content in given.items())
    Path("sweep.yaml").write_text(text)
    line = refused("sweep", "sweep.yaml")
    assert name in line
    assert "sweep.yaml" in line


@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        ("redis://127.0.0.1:1/0", "cannot be used"),
        ("host:1B", "no room"),
        ("disk:file:1GiB", "use"),
    ],
)
def test_no_cell_of_a_sweep_runs_where_one_has_no_tier(
    tiers: str, named: str, refused: Callable[..., str]
) -> None:
    grid = f'grid: {{tiers: ["host:1GiB", "{tiers}"]}}'
    Path("sweep.yaml").write_text(f"base: {{algo: [mepic], dataset: musique, limit: 2}}\n{grid}\n")
    line = refused("sweep", "sweep.yaml")
    assert "grid.tiers[1]" in line
    assert named in line
    assert not Path("runs").exists()


def numeric() -> list[tuple[str, str, str]]:
    """Every flag of every command that takes a number, with numbers that nothing can be."""
    found = []

    def walk(command: click.Command, path: tuple[str, ...]) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                walk(inner, (*path, name))
            return
        for option in command.params:
            if isinstance(option, click.Option):
                whole = isinstance(option.type, type(click.INT))
                bad = [HUGE, "inf"] if whole else ["inf", "nan"]
                if whole or isinstance(option.type, type(click.FLOAT)):
                    found.extend((" ".join(path), option.opts[0], text) for text in bad)

    walk(main, ())
    return found


def test_every_number_of_every_command_is_one_that_can_be(refused: Callable[..., str]) -> None:
    given = {"explain": "mepic", "profile": "trace.jsonl", "compare": "folder", "report": "folder"}
    given |= {"run": "--dataset=musique", "traffic": "--output=o", "reproduce": "mepic"}
    given |= {"route": "--server http://a tcp://a:1 tcp://a:2"}
    given |= {"measure profile": "--grid=none", "measure tiers": "--tiers=host:1MiB"}
    cases = numeric()
    assert len(cases) > 150
    for command, flag, value in cases:
        words = [*command.split(), *given.get(command, "").split(), flag, value]
        assert flag in refused(*words), words


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *(("run --data", "file"), ("run --output", "file"), ("run --requests", "file")),
        *(("run --model", "dir"), ("sweep", "file"), ("sweep --output", "dir")),
        *(("show", "file"), ("gate", "file"), ("report", "file"), ("table", "file")),
        *(("profile", "file"), ("profile --calibration", "file"), ("warm --chunks", "file")),
        *(("selftest --data", "file"), ("measure storm --output", "dir")),
    ],
)
def test_a_shell_completes_paths(words: str, kind: str) -> None:
    asked = {"_PICBENCH_COMPLETE": "bash_complete", "COMP_WORDS": f"picbench {words} res"}
    asked["COMP_CWORD"] = str(len(words.split()) + 1)
    done = CliRunner().invoke(main, env=asked, prog_name="picbench")
    assert done.output.splitlines() == [f"{kind},res"]
