"""The numbers that papers printed; they are stored with the results, outside the package."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "results" / "papers"


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
        found: Mapping[str, Any] = self.content["table1"]["rows"].get(label, {})
        return found

    def result(self, label: str, metric: str, arm: str) -> tuple[float, float] | None:
        """Table 2's mean and deviation of an arm (``mepic``, ``epic``, ``cacheblend``)."""
        row = self.content["table2"]["rows"].get(label, {}).get(metric, {})
        found = row.get(arm.partition(":")[0])
        return None if found is None else (float(found[0]), float(found[1]))

    def text(self, figure: str) -> Mapping[str, str]:
        """What the paper's text says about a figure."""
        found: Mapping[str, str] = self.content[figure]["text"]
        return found


def read_published(name: str) -> Published:
    """Read the file called `name` below results/papers; ConfigError where it is missing."""
    path = FOLDER / name
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}", hint="run from a checkout, or name it in `settings`"
        ) from error
    return Published(content["paper"], content["hardware"], content["model"], content)
