"""A plug-in of vLLM that lets picbench fail for some requests of a server.

A request says in its id where: ``fail-plan`` and so on. vLLM loads the plug-in into each of its
processes by its entry point.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = "faults"


def environment(folder: Path) -> dict[str, str]:
    """Write the entry point below `folder`; returns the variables with which vLLM finds it."""
    info = folder / "faults-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 0.0.0\n")
    entry = f"[vllm.general_plugins]\n{_NAME} = {__name__}:register\n"
    (info / "entry_points.txt").write_text(entry)
    folders = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, folders))
    return {"PYTHONPATH": path, "VLLM_PLUGINS": f"picbench,{_NAME}"}


def register() -> None:
    """Replace hooks of the linker and of the tier client by ones that may fail."""
    from picbench.engines.vllm.scheduler.linker import Linker
    from picbench.engines.vllm.transfer.tier_client import TierClient

    hooks = {"plan": "on_arrival", "map": "check_hits", "copy": "_fill", "count": "on_scheduled"}
    for name, hook in hooks.items():
        setattr(Linker, hook, _failing(getattr(Linker, hook), f"fail-{name}"))
    # vLLM puts a sample's number before the name of the endpoint.
    Linker.on_arrival = _failing(Linker.on_arrival, "0_cmpl-fail-first")
    TierClient._load = _failing(TierClient._load, "fail-load")


def _failing(hook: Callable[..., Any], word: str) -> Callable[..., Any]:
    """`hook`, whose first argument has a request id; it raises if the id has a word in it."""

    def method(self: Any, subject: Any, *args: Any) -> Any:
        if word in subject.request_id:
            raise RuntimeError(f"injected: {word}")
        return hook(self, subject, *args)

    return method
