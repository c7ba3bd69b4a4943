"""Lines and values of a file of requests, each with its place."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from picbench.errors import ConfigError, DataError

_HINT = "name another file"


@contextmanager
def refusing(source: str, hint: str = "see docs/traffic.md") -> Iterator[None]:
    """Have what is wrong with a request inside name its place, in one line."""
    from picbench.workloads.sources.row_schema import first_problem

    try:
        yield
    except ValueError as error:
        # The line's own number is in `source`.
        problem = first_problem(error).replace(" at line 1 column ", " at column ")
        raise DataError(f"{source}: {problem}", hint=hint) from error
    except KeyError as error:
        raise DataError(f"{source}: no field {error}", hint=hint) from error
    except (TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{source}: not of the form of its file: {error}", hint=hint) from error


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with its ``file:line``; gzip's files are unpacked.

    Raises ConfigError for an unreadable file.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2).startswith(b"\x1f\x8b")  # As gzip's files do.
            plain = gzip.GzipFile(fileobj=file) if packed else file
            text = io.TextIOWrapper(plain, encoding="utf-8-sig", errors="backslashreplace")
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}", hint=_HINT) from error


def parse_object(source: str, text: str, hint: str = "") -> dict[str, Any]:
    """A JSON object. Raises DataError with its place for anything else."""
    try:
        found = json.loads(text.rstrip())
    except RecursionError as error:
        raise DataError(f"{source}: Invalid JSON: recursion limit exceeded", hint=hint) from error
    except json.JSONDecodeError as error:
        # Of a text of several lines, the place is that of its own line.
        path, _, line = source.rpartition(":")
        source = f"{path}:{int(line) + error.lineno - 1}"
        what = f"Invalid JSON: {error.msg} at column {error.colno}"
        raise DataError(f"{source}: {what}", hint=hint) from error
    if not isinstance(found, dict):
        raise DataError(f"{source}: no JSON object", hint=hint)
    return found


def json_objects(
    lines: Iterator[tuple[str, str]], hint: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON Lines, or of one JSON value: an object, or a list of objects."""
    first = next(lines, None)
    if first is None:
        return
    source, line = first
    begin = line.lstrip()[:1]
    if begin == "[" or (begin == "{" and not _whole(line)):
        text = "".join(line for _, line in chain([first], lines))
        if begin == "[":  # Items have no line of their own.
            path = source.rpartition(":")[0]
            items = parse_object(source, f'{{"items": {text}}}', hint)["items"]
            for number, item in enumerate(items, 1):
                if not isinstance(item, dict):
                    raise DataError(f"{path}: item {number}: no JSON object", hint=hint)
                yield f"{path}: item {number}", item
            return
        yield source, parse_object(source, text, hint)
        return
    for place, text in chain([first], lines):
        yield place, parse_object(place, text, hint)


def _whole(line: str) -> bool:
    """Whether a line is a value by itself, or else broken in its middle."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos < len(line.rstrip())
    except RecursionError:
        return True
    return True
