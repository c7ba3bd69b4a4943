"""How fast the harness is: its commands, and what `picbench run` adds to each request.

Engines answer at once, in processes of their own, and replies are drawn. What is judged is the time
of all cores together, which other processes on the machine change little; the clock is told beside
it.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picbench.measure.harness.command_times import CommandTimes, time_command
from picbench.measure.harness.instant_run import RunCost, run_instantly
from picbench.measure.report import save, spread
from picbench.output import markdown, provenance

#: The arms of the runs that are reported and compared, and of those that are timed.
ARMS = ("full", "prefix", "naive", "mepic")
TIMED = ("full", "mepic")

#: Seconds that commands may take, milliseconds a request, bytes of a report.
LIMITS = {"--help": 0.3, "list algorithms": 0.3, "compare": 5.0, "report": 10.0}
LIMIT_MS, LIMIT_BYTES = 1.0, 5_000_000


@dataclass(frozen=True, slots=True)
class HarnessSettings:
    """Samples of the runs that are read, requests of those that are timed, and how often."""

    samples: int
    requests: int
    repeats: int


@dataclass(frozen=True, slots=True)
class HarnessSpeed:
    """What was measured; `runs` are those that were timed request by request."""

    settings: HarnessSettings
    commands: tuple[CommandTimes, ...]
    report_bytes: int
    runs: tuple[RunCost, ...]

    def excesses(self) -> list[str]:
        """What takes longer, or is larger, than it may."""
        slow = [
            f"{found.command} takes {statistics.median(found.cpu_s):.2f} s"
            for found in self.commands
            if statistics.median(found.cpu_s) > LIMITS[found.command]
        ]
        each = statistics.median(run.each_ms for run in self.runs)
        if each > LIMIT_MS:
            slow.append(f"a request costs {each:.2f} ms")
        if self.report_bytes > LIMIT_BYTES:
            slow.append(f"a report has {self.report_bytes / 1e6:.1f} MB")
        return slow


def measure(settings: HarnessSettings) -> HarnessSpeed:
    """Measure everything in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed = settings.requests // len(TIMED)
        runs = [run_instantly(folder / f"run-{n}", TIMED, timed) for n in range(settings.repeats)]
        for number in range(2):
            run_instantly(folder / f"large-{number}", ARMS, settings.samples, seed=number)
        commands = tuple(_commands(folder, settings.repeats))
        size = (folder / "large-0" / "report.html").stat().st_size
    return HarnessSpeed(settings, commands, size, tuple(runs))


def measure_all(settings: HarnessSettings, commit: str | None, output: Path) -> tuple[bool, str]:
    """Whether all is as fast as it has to be, and a page; both files go to `output`."""
    found = measure(settings)
    facts = provenance.facts("cpu", "cores", "load", *_VERSIONS, "commit", commit=commit)
    page = render(found, facts)
    save(output / "harness-speed", {"schema": 1, "provenance": facts, **asdict(found)}, page)
    return not found.excesses(), page


def render(found: HarnessSpeed, facts: Mapping[str, Any]) -> str:
    """The page: commands, then a request."""
    settings, arms = found.settings, len(ARMS)
    excesses = "; ".join(found.excesses())
    verdict = f"Too much: {excesses}." if excesses else "All limits are kept."
    versions = ", ".join(f"{name} {facts[name]}" for name in _VERSIONS)
    load = facts["load"][0]
    return (
        "# What the harness costs\n\n"
        f"{facts['cpu']}, {facts['cores']} cores, load {load:.1f} at the end; {versions}; commit "
        f"{facts['commit']}.\n`picbench measure harness --samples {settings.samples} --requests "
        f"{settings.requests} --repeats {settings.repeats} --output results/cpu`\n\n"
        "Engines answer at once and replies are drawn: no number here is about an algorithm. Times "
        "are medians (lowest - highest).\nCore time is that of all threads together, and is what "
        "limits are for; the clock also has what other processes on the machine take.\n\n"
        f"## Commands\n\n`compare` reads two runs, and `report` one, of {arms} arms and "
        f"{settings.samples:,} samples an arm. The report has {found.report_bytes / 1e6:.1f} MB "
        f"(limit {LIMIT_BYTES / 1e6:g}).\n\n{_command_table(found.commands)}\n\n"
        f"## A request\n\nRuns of {found.runs[0].requests:,} requests of two arms, of 2,240 tokens "
        "in 20 chunks; 8 scheduler steps a request are in the ledger.\n\n"
        f"{_request_table(found.runs)}\n\n{verdict}\n"
    )


_VERSIONS = ("python", "numpy", "scipy", "pydantic", "pyarrow", "jinja2", "matplotlib")


def _commands(folder: Path, repeats: int) -> Iterator[CommandTimes]:
    first, second = str(folder / "large-0"), str(folder / "large-1")
    yield time_command("--help", ["--help"], repeats)
    yield time_command("list algorithms", ["list", "algorithms"], repeats)
    yield time_command("compare", ["compare", first, second], repeats)
    yield time_command("report", ["report", first], repeats)


def _command_table(commands: Sequence[CommandTimes]) -> str:
    head = ("command", "core time s", "clock s", "limit s", "n")
    rows = [
        [
            f"`picbench {found.command}`",
            spread(found.cpu_s, 2),
            spread(found.wall_s, 2),
            f"{LIMITS[found.command]:g}",
            str(len(found.cpu_s)),
        ]
        for found in commands
    ]
    return markdown.table(head, rows)


def _request_table(runs: Sequence[RunCost]) -> str:
    """Milliseconds a request, part by part."""

    def cells(name: str, seconds: Sequence[float]) -> list[str]:
        each = [1e3 * s / run.requests for s, run in zip(seconds, runs, strict=True)]
        return [name, spread(each, 2), str(len(runs))]

    parts = [
        cells("checks, sizes and fingerprints before engines start", [r.prepare_s for r in runs]),
        cells("serving: schedule, messages, rows, batch log, summary", [r.serve_s for r in runs]),
        cells(f"both (limit {LIMIT_MS:g})", [r.prepare_s + r.serve_s for r in runs]),
        cells("serving, on the clock, while no engine is busy", [r.waiting_s for r in runs]),
    ]
    files = spread([run.files_s for run in runs], 1)
    table = markdown.table(("part", "ms a request", "runs"), parts)
    return f"{table}\n\nTables and figures take {files} s of core time once a run."
