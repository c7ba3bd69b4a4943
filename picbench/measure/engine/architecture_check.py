"""Compares an engine with the oracle on a tiny model of every architecture.

Each model is served by a process of its own (``picbench measure oracle``), so that an engine that
fails is one row and not the end of the check.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from picbench.errors import ConfigError
from picbench.measure.report import save
from picbench.names import closest
from picbench.output import provenance
from picbench.output.markdown import table
from picbench.workloads.models.architectures import ARCHITECTURES, Architecture
from picbench.workloads.models.random_weights import write

CheckOutcome = Literal["checked", "refused", "wrong", "failed"]

#: Verdicts by exit code of ``picbench measure oracle``.
_VERDICTS: Mapping[int, CheckOutcome] = {0: "checked", 1: "wrong", ConfigError.exit_code: "refused"}

#: The line that says what became of a process.
_LINES: Mapping[CheckOutcome, str] = {
    "checked": "^all agree.*$",
    "wrong": "^WRONG.*$",
    "refused": "^picbench: (.*)$",
    "failed": "^picbench: (.*)$",
}

#: Characters of the log of a process that failed.
_TAIL = 4000


@dataclass(frozen=True, slots=True)
class ArchitectureVerdict:
    """What became of one architecture; `line` is what its process said of it."""

    name: str
    verdict: CheckOutcome
    line: str


def measure(
    device: str,
    dtype: str,
    *,
    eager: bool,
    only: Sequence[str],
    jobs: int,
    commit: str | None,
    output: Path,
) -> bool:
    """Check the named architectures, or all, and write and print what was found.

    Returns whether each is what the table says of this device, or better. Raises ConfigError for an
    unknown name.
    """
    chosen = _chosen(only)
    flags = ["--device", device, "--dtype", dtype, *(["--eager"] if eager else [])]
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        # One after another: torch's generator belongs to all threads.
        models = [write(row, Path(scratch) / row.name) for row in chosen]
        found = list(pool.map(partial(_check, flags=flags), chosen, models))
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    settings = {"device": device, "dtype": dtype, "eager": eager}
    document = {
        "schema": 1,
        "provenance": facts | settings,
        "found": [asdict(row) for row in found],
    }
    page = render(found, facts | settings)
    save(output / "architectures", document, page)
    print(page)
    return all(
        _is_as_tabled(row, verdict, device) for row, verdict in zip(chosen, found, strict=True)
    )


def render(found: Sequence[ArchitectureVerdict], facts: Mapping[str, Any]) -> str:
    """The page: a line for each architecture, and what was measured with what."""
    lines = table(
        ("architecture", "verdict", "what was said"),
        [(row.name, row.verdict, row.line.replace("|", "/")) for row in found],
    )
    made = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"# Architectures against the oracle\n\n{lines}\n\n{made}\n"


def _chosen(only: Sequence[str]) -> list[Architecture]:
    names = [row.name for row in ARCHITECTURES]
    for name in only:
        if name not in names:
            raise ConfigError(f"`only` {name}: no such architecture", hint=closest(name, names))
    return [row for row in ARCHITECTURES if not only or row.name in only]


def _check(row: Architecture, model: Path, *, flags: Sequence[str]) -> ArchitectureVerdict:
    command = [sys.executable, "-m", "picbench", "measure", "oracle", "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = judge(row.name, done.returncode, done.stdout, done.stderr)
    print(f"{found.verdict:8} {found.name:14} {found.line}", flush=True)
    if found.verdict == "failed":
        print(done.stderr[-_TAIL:], flush=True)
    return found


def judge(name: str, code: int, stdout: str, stderr: str) -> ArchitectureVerdict:
    """What a process's exit code and output say; vLLM logs before and after the line that counts.

    Where replies are wrong, the line is the first that says so. The error is the last line: engines
    log under the same name before it.
    """
    verdict = _VERDICTS.get(code, "failed")
    said = re.findall(_LINES[verdict], f"{stdout}\n{stderr}", re.MULTILINE)
    if not said:
        return ArchitectureVerdict(name, verdict, f"ended with exit code {code}")
    return ArchitectureVerdict(name, verdict, said[0 if verdict == "wrong" else -1])


def _is_as_tabled(row: Architecture, found: ArchitectureVerdict, device: str) -> bool:
    """Whether a verdict is the table's; nothing may be wrong, or fail without a reason."""
    claimed = row.gpu if device == "cuda" else row.cpu
    if claimed == "refused":
        return found.verdict == "refused" and row.why in found.line
    return found.verdict == "checked" or (claimed == "not checked" and found.verdict == "refused")
