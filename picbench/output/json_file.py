"""JSON: files that are replaced as a whole, and lines of files that grow."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import from_json

from picbench.whole_files import whole_file


def write_json(
    path: Path, value: Mapping[str, Any] | Sequence[Any], *, indent: int | None = 2
) -> None:
    """Write JSON so that a reader finds the old file or the new one, never half of one.

    Without an `indent` it is one line: for long arrays.
    """
    separators = None if indent else (",", ":")
    text = json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    with whole_file(path, durable=True) as file:
        file.write(text.encode() + b"\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process on this machine holds a file, and hold it.

    For files that are read, changed and replaced. The lock is a file of its own, because a replaced
    one is another file, and not beside it, because it stays.
    """
    name = hashlib.sha256(f"{os.getuid()} {path.absolute()}".encode()).hexdigest()[:16]
    with Path(tempfile.gettempdir(), f"picbench-{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def parse_line(text: bytes) -> Any:
    """A line of JSON; ValueError for anything else. Several times as fast as `json`.

    Only `json` reads the lone surrogates that replies may have. NaN is no JSON, and would differ
    from nothing that it is compared with.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
