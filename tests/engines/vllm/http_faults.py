"""A plug-in of vLLM that lets picbench fail for some requests of a server.

A request says in its id where: ``fail-plan`` and so on. vLLM loads the plug-in into each of its
processes by its entry point. What the scheduler and the worker count is written to files, too.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = "faults"

#: The variable that names the folder of counters.
_FOLDER = "COUNTERS_OF_ENGINE"


def environment(folder: Path) -> dict[str, str]:
    """Write the entry point below `folder`; returns the variables with which vLLM finds it."""
    info = folder / "faults-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 0.0.0\n")
    entry = f"[vllm.general_plugins]\n{_NAME} = {__name__}:register\n"
    (info / "entry_points.txt").write_text(entry)
    folders = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, folders))
    return {"PYTHONPATH": path, "VLLM_PLUGINS": f"picbench,{_NAME}", _FOLDER: str(folder)}


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
        file = Path(os.environ[_FOLDER]) / ("worker.json" if of else "scheduler.json")

        def noted() -> Any:
            found = read(*of)
            file.write_text(json.dumps(found))
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
