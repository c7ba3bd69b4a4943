"""The numbers that papers printed; they are in the package, so that a wheel has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError

FOLDER = Path(__file__).with_name("files")


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's printed numbers and what they were measured on."""

    paper: str
    hardware: str
    model: str
    content: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What the numbers were measured on."""
        return f"{self.model} on {self.hardware}"

    def workload(self, label: str) -> Mapping[str, Any]:
        """Table 1's row of a workload; empty where the paper has none."""
        rows: Mapping[str, Any] = self.content.get("table1", {}).get("rows", {})
        found: Mapping[str, Any] = rows.get(label, {})
        return found

    def result(self, label: str, metric: str, arm: str) -> tuple[float, float] | None:
        """Table 2's mean and deviation of an arm (``mepic``, ``epic``, ``cacheblend``)."""
        rows = self.content.get("table2", {}).get("rows", {})
        found = rows.get(label, {}).get(metric, {}).get(arm.partition(":")[0])
        return None if found is None else (float(found[0]), float(found[1]))

    def text(self, figure: str) -> Mapping[str, str]:
        """What the paper's text says about a figure."""
        found: Mapping[str, str] = self.content.get(figure, {}).get("text", {})
        return found


def read_published(name: str) -> Published:
    """Read the file called `name`; ConfigError where it is missing or broken."""
    path = FOLDER / name
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(found.name for found in FOLDER.glob("*.json")))
        raise ConfigError(
            f"`published` {path.name}: cannot be read: {error}", hint=f"there are {known}"
        ) from error
    return Published(content["paper"], content["hardware"], content["model"], content)
