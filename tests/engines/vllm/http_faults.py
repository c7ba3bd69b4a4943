"""A plug-in of vLLM that lets picbench fail for some requests of a server.

A request says in its id where: ``fail-plan`` and so on. What the scheduler and the worker count is
written to files, too.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_plug_in import FOLDER


def engine_counts(folder: Path) -> dict[str, int]:
    """What the scheduler and the worker had counted when they were asked last."""
    return {k: n for path in folder.glob("*.json") for k, n in json.loads(path.read_text()).items()}


def register() -> None:
    """Replace hooks of the linker and of the tier client by ones that may fail."""
    from picbench.engines.vllm.metrics import ConnectorMetrics
    from picbench.engines.vllm.scheduler.linker import Linker
    from picbench.engines.vllm.transfer.tier_client import TierClient

    hooks = {"plan": "on_arrival", "map": "check_hits", "copy": "_fill", "count": "on_scheduled"}
    for name, hook in hooks.items():
        setattr(Linker, hook, _failing(getattr(Linker, hook), f"fail-{name}"))
    # vLLM puts a sample's number before the name of the endpoint.
    Linker.on_arrival = _failing(Linker.on_arrival, "0_cmpl-fail-first")
    TierClient._load = _failing(TierClient._load, "fail-load")
    report = ConnectorMetrics.report

    def noting(self: Any, read: Callable[..., Any], *of: Any) -> None:
        file = Path(os.environ[FOLDER]) / ("worker.json" if of else "scheduler.json")

        def noted() -> Any:
            found = read(*of)
            file.with_suffix(".new").write_text(json.dumps(found))
            file.with_suffix(".new").rename(file)
            return found

        report(self, noted)

    ConnectorMetrics.report = noting  # type: ignore[method-assign]


def _failing(hook: Callable[..., Any], word: str) -> Callable[..., Any]:
    """`hook`, whose first argument has a request id; it raises if the id has a word in it."""

    def method(self: Any, subject: Any, *args: Any) -> Any:
        if word in subject.request_id:
            raise RuntimeError(f"injected: {word}")
        return hook(self, subject, *args)

    return method
