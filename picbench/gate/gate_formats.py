"""The formats of a gate's result: text, JSON, GitHub's, JUnit's."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from xml.etree import ElementTree

from picbench.gate.checks import Check, GateResult, GateVerdict
from picbench.output.github import annotation
from picbench.output.markdown import table

#: Of the JSON document.
SCHEMA = 1

_LEVELS = {GateVerdict.REGRESSION: "error", GateVerdict.INCONCLUSIVE: "warning"}


def gate_text(result: GateResult) -> str:
    """A line for each check that is not ok, and the verdict."""
    return "\n".join([*_lines(result), *result.notes, _verdict(result)])


def gate_json(result: GateResult) -> str:
    """All checks on one line."""
    return json.dumps(
        {"schema": SCHEMA, "verdict": result.verdict, **asdict(result)}, allow_nan=False
    )


def gate_annotations(result: GateResult) -> str:
    """A workflow command for each check that is not ok."""
    return "\n".join(
        annotation(_LEVELS[check.verdict], f"{check.arm} {check.metric}", check.message)
        for check in result.checks
        if check.verdict in _LEVELS
    )


def gate_markdown(result: GateResult) -> str:
    """The verdict, and a table of all checks, the worst first."""
    order = (GateVerdict.REGRESSION, GateVerdict.INCONCLUSIVE, GateVerdict.OK)
    checks = sorted(result.checks, key=lambda check: order.index(check.verdict))
    rows = [(c.verdict, c.arm, c.metric, c.message) for c in checks]
    head = ("verdict", "arm", "metric", "baseline and run")
    notes = "".join(f"\n{note}\n" for note in result.notes)
    return f"## {_verdict(result)}\n\n{table(head, rows)}\n{notes}"


def gate_junit(result: GateResult) -> str:
    """A test suite with a case for each check; inconclusive ones are skipped."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"picbench gate {result.baseline}",
        tests=str(len(result.checks)),
        failures=str(len(result.found(GateVerdict.REGRESSION))),
        skipped=str(len(result.found(GateVerdict.INCONCLUSIVE))),
    )
    for check in result.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=check.arm, name=check.metric)
        if check.verdict is GateVerdict.REGRESSION:
            ElementTree.SubElement(case, "failure", message=check.message)
        elif check.verdict is GateVerdict.INCONCLUSIVE:
            ElementTree.SubElement(case, "skipped", message=check.message)
        else:
            ElementTree.SubElement(case, "system-out").text = check.message
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


#: What goes to stdout, by the name that users give.
FORMATS: Mapping[str, Callable[[GateResult], str]] = {
    "text": gate_text,
    "json": gate_json,
    "github": gate_annotations,
    "junit": gate_junit,
}


def _lines(result: GateResult) -> Iterator[str]:
    for check in result.checks:
        if check.verdict is not GateVerdict.OK:
            yield _line(check)


def _line(check: Check) -> str:
    return f"{check.verdict.upper()} {check.arm} {check.metric}: {check.message}"


def _verdict(result: GateResult) -> str:
    counts = [(verdict, len(result.found(verdict))) for verdict in GateVerdict]
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    return f"{result.run} against {result.baseline}: {found or 'nothing to check'}"
