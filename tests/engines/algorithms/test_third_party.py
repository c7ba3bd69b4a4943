"""An algorithm of another package, as docs/adding-an-algorithm.md has it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.algorithms import names, parse
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.oracle import Oracle, Rule
from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError

PACKAGE = Path(__file__).parent / "third_party"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The package on the path with the metadata that pip would write; the environment with it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    heading = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(heading)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for folder in (PACKAGE, tmp_path):
        monkeypatch.syspath_prepend(folder)
    paths = [str(PACKAGE), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    yield os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "NO_COLOR": "1"}
    sys.modules.pop("pic_edges", None)


def picbench(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "picbench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_after_picbenchs_own(installed: dict[str, str]) -> None:
    _, last = picbench(installed, "list", "algorithms").split("\nedges  ")
    assert all(line.startswith(" ") for line in last.splitlines()[1:])
    assert "n=a whole number of at least 0 (default 8)" in " ".join(last.split())
    assert names()[-1] == "edges"


def test_its_options_are_read_and_checked(installed: dict[str, str]) -> None:
    assert parse("edges:pad=paper").spec == "edges:n=8:pad=paper"
    assert list(parse("edges:n=2").plan_chunk(0, 5).linked) == [0, 1, 3, 4]
    assert list(parse("edges:n=4").plan_chunk(0, 5).linked) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="use a whole number of at least 0"):
        parse("edges:n=-1")


def test_its_plan_can_be_seen(installed: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "edges.png"
    shown = picbench(installed, "explain", "edges", "--chunks", "1", "--output", str(picture))
    assert "   0  shared    ........ssssssss  chunk 1 28-35\n" in shown
    # The last block of the chunk has 8 tokens, all of which are linked, so it is not mapped.
    assert "maps 2 shared blocks" in shown
    assert "16 of 20-59  linked" in shown
    assert picture.stat().st_size > 1000


@pytest.fixture
def plug_in(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """picbench's plug-in as a process loads it in which the package is installed."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.input_processor import InputProcessor

    from picbench.engines.vllm.frontend.patches import extend_frontend

    load_general_plugins()
    extend_frontend()
    guarded: Any = InputProcessor.process_inputs
    monkeypatch.setattr(InputProcessor, "process_inputs", guarded.__wrapped__)
    extend_frontend()


@pytest.mark.engine
@pytest.mark.usefixtures("plug_in")
def test_an_engine_serves_it(llama: Path, oracle: Oracle, draw: Any, deviation: Any) -> None:
    def both_ends(index: int, length: int) -> set[int]:
        return {i for i in range(length) if i < 8 or i >= length - 8}

    chunks = [Chunk(tokens=draw(length, length)) for length in (40, 7, 33)]
    request = Request([Text(tokens=draw(20, 1)), *chunks, Text(tokens=draw(9, 2))], "edges")
    config = EngineConfig(model=str(llama), dtype="float32", kv_blocks=100, context=512)
    with Engine(config) as engine:
        results = [
            engine.generate([request], max_tokens=3, logprobs=8, ignore_eos=True)[0]
            for _ in range(2)
        ]
    cold, warm = results
    for result in results:
        assert deviation(oracle, Rule(both_ends), request, result) < 1e-3
    assert cold.counts.linked == 16 + 7 + 16
    assert warm.counts.compile_work == 0 < cold.counts.compile_work
