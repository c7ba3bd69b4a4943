"""Baselines as files: where they are, and how they are read and written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from picbench.errors import ConfigError, InvalidRun
from picbench.gate.baseline import SCHEMA, Baseline
from picbench.names import closest
from picbench.validation import first_refusal
from picbench.whole_files import write_whole

#: Where baselines with a name are, below the current directory.
FOLDER = Path("baselines")

_SUFFIXES = (".json", ".yaml", ".yml")


def baseline_path(name: str) -> Path:
    """The file of a baseline: `name` itself if it is a path, else the one of that name."""
    path = Path(name)
    if path.suffix in _SUFFIXES or len(path.parts) > 1:
        return path
    found = [FOLDER / f"{name}{suffix}" for suffix in _SUFFIXES]
    return next((path for path in found if path.exists()), found[0])


def list_baselines() -> Iterator[tuple[str, Path]]:
    """Names and files of the baselines in the folder."""
    for path in sorted(FOLDER.glob("*")):
        if path.suffix in _SUFFIXES:
            yield path.stem, path


def read_baseline(name: str) -> Baseline:
    """Read a baseline by name or path.

    Raises ConfigError where there is none and for a wrong field, InvalidRun for another schema.
    """
    path = baseline_path(name)
    if not path.exists() and Path(name).is_file():
        path = Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else _from_yaml(text)
    except OSError as error:
        names = [found for found, _ in list_baselines()]
        hint = closest(name, names) if names else "picbench baseline save makes one"
        raise ConfigError(f"`baseline` {path}: {error.strerror}", hint=hint) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"`baseline` {path}: {error}", hint="save it again") from error
    _check_schema(path, values)
    try:
        return Baseline.model_validate(values)
    except ValidationError as error:
        message = f"`baseline` {path}: {first_refusal(error)}"
        raise ConfigError(message, hint="see docs/ci.md") from error


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline as JSON or YAML, whichever the name says, whole or not at all.

    Raises ConfigError if it cannot be written; a file that was there before then stays.
    """
    values = baseline.model_dump(mode="json", exclude_none=False)
    text = _to_yaml(values) if path.suffix in (".yaml", ".yml") else _to_json(values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name another file") from error


def _check_schema(path: Path, values: object) -> None:
    schema = values.get("baseline") if isinstance(values, dict) else None
    if schema is None:
        raise ConfigError(f"`baseline` {path}: is no baseline", hint="save one from a run")
    if schema != SCHEMA:
        raise InvalidRun(
            f"{path} has schema {schema}, this version reads {SCHEMA}", hint="save it again"
        )


def _to_json(values: dict[str, Any]) -> str:
    """Indented where people read and edit, each column of an arm on a line of its own."""
    arms = values["arms"]
    head = json.dumps({**values, "arms": None}, indent=2, allow_nan=False)
    lines = ",\n".join(f"    {json.dumps(name)}: {_arm(arm)}" for name, arm in arms.items())
    return head.removesuffix("null\n}") + "{\n" + lines + "\n  }\n}\n"


def _arm(arm: dict[str, Any]) -> str:
    columns = ",\n".join(
        f"      {json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in arm.items()
    )
    return "{\n" + columns + "\n    }"


def _to_yaml(values: dict[str, Any]) -> str:
    return str(yaml.dump(values, Dumper=_fast("SafeDumper"), sort_keys=False, width=1000))


def _from_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_fast("SafeLoader"))


def _fast(name: str) -> Any:
    """libyaml's class where PyYAML was built with it: ten times as fast, and the same."""
    return getattr(yaml, f"C{name}", getattr(yaml, name))
