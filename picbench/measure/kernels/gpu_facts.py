"""Where a GPU measurement was taken, and the figures that several of them share a file for."""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def provenance(commit: str, rounds: int, seed: int) -> dict[str, Any]:
    """Hardware, versions and settings of a run."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "vllm": importlib.metadata.version("vllm"),
        "commit": commit,
        "rounds": rounds,
        "seed": seed,
    }


def update(path: Path, figures: Mapping[str, Any]) -> None:
    """Put figures into a JSON file beside those that are there."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | dict(figures), indent=1) + "\n", "utf-8")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    # One line a GPU, and one driver for all of them.
    return next(iter(found.stdout.split()), "unknown")
