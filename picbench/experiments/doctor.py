"""Whether this installation is sound, and whether its engines give the right answers."""

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.self_check import Comparison, SelfCheck
from picbench.engines.vllm.installation import Finding, inspect_device, inspect_installation
from picbench.errors import PicBenchError
from picbench.run.session import Launch
from picbench.store import provenance
from picbench.store.provenance import cores, quiet_engine
from picbench.workloads import models

#: Room for the self-check's prompts: tokens of context, blocks of the KV pool, and tokens of a
#: step, few enough that a prompt takes several.
_CONTEXT, _POOL, _STEP = 1024, 256, 256

#: Chunks that requests copy are kept here.
_TIERS = "host:256MiB"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, in the order in which it is read."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing has a fault."""
        return not any(finding.fault for finding in self.findings)

    @property
    def verdict(self) -> str:
        """``ok``, or ``not ok`` and what is not."""
        faults = [finding.fault for finding in self.findings if finding.fault]
        return "; ".join(["not ok: " + faults[0], *faults[1:]]) if faults else "ok"

    def document(self) -> dict[str, Any]:
        """The same as JSON values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"schema": 1, "ok": self.ok, "verdict": self.verdict, "findings": findings}

    def text(self) -> str:
        """A finding a line, below each other by section, and the verdict as the last line."""
        widths = [max(map(len, column)) for column in zip(*self._names(), strict=True)]
        lines, section = [], ""
        for finding in self.findings:
            shown = "" if finding.section == section else finding.section
            section = finding.section
            mark = "   <- not ok" if finding.fault else ""
            lines.append(
                f"{shown:<{widths[0]}}  {finding.name:<{widths[1]}}  {finding.found}{mark}".rstrip()
            )
        return "\n".join([*lines, self.verdict])

    def _names(self) -> list[tuple[str, str]]:
        return [(finding.section, finding.name) for finding in self.findings]


def diagnose(model: str | None, device: str, dtype: str, launch: Launch) -> Diagnosis:
    """Look at this installation and machine and, with a `model`, at the answers of its engines.

    Engines are only started where all else is right. Raises ConfigError for a model or a device
    that does not exist.
    """
    quiet_engine()
    findings = [*inspect_installation()]
    broken = any(finding.fault for finding in findings)
    findings += _machine(device) if not broken else ()
    if model is None:
        return Diagnosis(tuple(findings))
    if broken:
        return Diagnosis((*findings, Finding("self-check", model, "not run")))
    return Diagnosis((*findings, *_self_check(model, device, dtype, launch)))


def _machine(device: str) -> Iterator[Finding]:
    yield Finding("device", "cpu", f"{provenance.cpu_model()}, {cores()} cores")
    gpus = [f"{gpu['name']} ({gpu['memory']}, driver {gpu['driver']})" for gpu in provenance.gpus()]
    yield Finding("device", "gpu", ", ".join(gpus) or "none")
    yield from inspect_device(device)


def _self_check(model: str, device: str, dtype: str, launch: Launch) -> Iterator[Finding]:
    found = models.resolve(model)
    config = EngineConfig(
        model=str(found.path),
        device=device,
        dtype=dtype,
        context=min(_CONTEXT, found.context or _CONTEXT),
        kv_blocks=_POOL,
        batch_tokens=_STEP,
        max_requests=16,
        eager=True,
        tiers=_TIERS,
    )
    began = time.perf_counter()
    try:
        checked, kind = _compare(config, launch)
    except PicBenchError as error:
        yield Finding("self-check", found.label, "an engine failed", str(error))
        return
    seconds = time.perf_counter() - began
    yield Finding("self-check", found.label, f"{kind}, {seconds:.0f} s; largest differences:")
    for comparison in checked.comparisons:
        yield _row(comparison)


def _row(comparison: Comparison) -> Finding:
    text = f"{comparison.difference:.1e}, at most {comparison.limit:.1e}"
    return Finding("self-check", comparison.name, text, comparison.fault)


def _compare(config: EngineConfig, launch: Launch) -> tuple[SelfCheck, object]:
    """picbench beside stock vLLM, one after the other: a GPU may have room for one of them."""
    stock = replace(config, stock=True, algorithm="prefix", tiers="")
    with TemporaryDirectory(prefix="picbench-") as logs:
        known, kind = _ask(launch, "stock", stock, Path(logs), "checked_prompts")
        checked, _ = _ask(launch, "picbench", config, Path(logs), "self_check", known)
    return checked, f"{kind['dtype']} on {kind['device']}"


def _ask(
    launch: Launch, name: str, config: EngineConfig, logs: Path, method: str, *arguments: Any
) -> tuple[Any, Any]:
    """The answer of a method of an engine in a process of its own, and what the engine is."""
    server = launch(name, config, logs / f"{name}.log")
    try:
        kind = server.ready()
        answer = server.call(_method(method, *arguments))
        server.close()
    finally:
        server.kill()
    return answer, kind


def _method(name: str, *arguments: Any) -> Callable[[Any], Any]:
    return operator.methodcaller(name, *arguments)
