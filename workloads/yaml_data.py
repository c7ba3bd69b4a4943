"""Words, templates and tables that come with picbench as YAML, read when they are first needed."""

from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_data(package: str, name: str) -> Any:
    """The content of ``data/<name>.yaml`` in a package of `workloads`; it must not be changed."""
    import yaml

    file = Path(__file__).parent / package / "data" / f"{name}.yaml"
    # The parser of libyaml, where PyYAML has it, takes a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
