"""How far today's code is from what was measured on a GPU."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picbench.store.provenance import gpu_lines


def changed_lines(folder: Path, facts: Mapping[str, Any]) -> int | None:
    """How many lines were added to the GPU path or taken from it since `facts`; None if unknown.

    That is where `folder` has no record of what was measured. Lines that moved are not counted.
    """
    path = folder / f"code-{facts.get('code')}.json"
    if not path.exists():
        return None
    then, now = (
        Counter(text[i : i + 4] for text in files.values() for i in range(0, len(text), 4))
        for files in (json.loads(path.read_bytes())["files"], gpu_lines())
    )
    return ((then - now) + (now - then)).total()
