"""What needs no engine works without the packages that come with extras."""

import subprocess
import sys
from pathlib import Path

from harness_fakes import Harness, make_sample, run_fakes

ABSENT = ("adjustText", "datasets", "matplotlib", "pandas", "pyarrow", "torch", "transformers")

MAIN = """
import shlex, sys
from importlib.machinery import PathFinder

class Core(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {absent!r}
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Core if finder is PathFinder else finder for finder in sys.meta_path]
from picbench.cli import main
for command in sys.argv[1:]:
    try:
        main(shlex.split(command))
    except SystemExit as ended:
        print(ended.code, command, file=sys.stderr)
"""

COMMANDS = [
    "list algorithms",
    "explain mepic",
    "show run",
    "table run",
    "compare run",
    "report run",
    "baseline save run mine",
    "gate run --baseline mine",
    "traffic --output requests.jsonl --requests 8 --chunks 8",
    "profile requests.jsonl",
    "run --dataset musique --reuse 0.5 --limit 4 --dry-run",
    "run --requests requests.jsonl --dry-run",
]


def picbench(folder: Path, *commands: str) -> list[str]:
    """What is said on standard error by commands, all in one process; each ends with its code."""
    script = MAIN.format(absent=(*ABSENT, "vllm"))
    command = [sys.executable, "-c", script, *commands]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_the_core_does_what_needs_no_engine(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(n) for n in range(4)]), tmp_path / "run", "full", "mepic")
    assert picbench(tmp_path, *COMMANDS) == [f"0 {command}" for command in COMMANDS]
    (tmp_path / "rows.parquet").write_bytes(b"")
    csv, rows = "table run --format csv", "run --dataset musique --data rows.parquet --dry-run"
    assert picbench(tmp_path, csv, rows) == [
        "picbench: this needs pandas (pip install 'picbench[figures]')",
        f"2 {csv}",
        "picbench: this needs datasets (pip install 'picbench[rows]')",
        f"2 {rows}",
    ]
