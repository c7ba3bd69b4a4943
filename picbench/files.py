"""Files that are written whole or not at all, and errors that name the file."""

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from errno import EDQUOT, EINVAL, ENOLCK, ENOSPC, ENOTDIR, ENOTSUP
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pydantic_core import ValidationError, from_json

from picbench.errors import ConfigError, first_refusal

#: The numbers of errors that say that a disk is full: with room, the same can be written.
FULL_DISK = frozenset({ENOSPC, EDQUOT})

#: The file in a folder that is held, and what the name of one beside a file ends with.
LOCK = ".lock"


@contextmanager
def reading(
    where: str,
    *,
    missing: str = "",
    wrong: str = "",
    kind: type[ConfigError] = ConfigError,
    lower: bool = False,
) -> Iterator[None]:
    """Have errors of what is read and checked inside begin with `where`; all become ConfigErrors.

    Their hints are `missing` for a file that cannot be read, `wrong` for what is in it, and their
    own. `lower` is that of `first_refusal`.
    """
    import yaml

    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    except OSError as error:
        raise kind(f"{where}: {error.strerror}", hint=missing) from error
    except ValidationError as error:
        raise kind(f"{where}: {first_refusal(error, lower=lower)}", hint=wrong) from error
    except json.JSONDecodeError as error:
        raise kind(f"{where}: it must be JSON: {error}", hint=wrong) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        said = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise kind(f"{where}: {said}", hint=wrong) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as `whole_file` does; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write; a reader finds the old one until the block has ended, never half of one.

    It is on the disk then if `durable`. A block that raises leaves the old file. Threads and
    processes that write the same file do not meet. Raises OSError that names `path` where it cannot
    be written, and for what is no regular file, such as a device, which would be replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "not a regular file", str(path))
    draft = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    with naming(path, draft):
        try:
            with draft.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Raise NotADirectoryError that names `path` where it lies below a file, so never can be made.

    Whether a path exists is no answer: of what lies below a file, nothing does.
    """
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if nearest != path and not nearest.is_dir():
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(path))


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Let an OSError name `path` if it names no file, as those of writing, or only its `draft`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(draft)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(
    path: Path, value: Mapping[str, Any] | Sequence[Any], *, indent: int | None = 2
) -> None:
    """Write JSON so that a reader finds the old file or the new one, never half of one.

    Without an `indent` it is one line: for long arrays. The folder is made where there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    separators = None if indent else (",", ":")
    text = json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    with whole_file(path, durable=True) as file:
        file.write(f"{text}\n".encode())


def locked(path: Path) -> AbstractContextManager[None]:
    """Wait until no other process or thread holds a file, and hold it.

    For what is read, changed and replaced. The lock is a file beside it, because a replaced one is
    another file.
    """
    return locked_at(path.with_name(f".{path.name}{LOCK}"))


@contextmanager
def locked_at(place: Path, taken: Exception | None = None) -> Iterator[None]:
    """Hold the lock file `place`; raise `taken`, or wait, where another process or thread has it.

    The lock ends with the process, and the file is removed with it unless that is killed. File
    systems without locks hold nothing.
    """
    from filelock import FileLock

    lock = FileLock(place)
    try:
        lock.acquire(timeout=0 if taken else -1)
    except OSError as error:  # A TimeoutError is one.
        if taken and isinstance(error, TimeoutError):
            raise taken from error
        if error.errno not in (ENOLCK, ENOTSUP):
            raise
    try:
        yield
    finally:
        # Whoever waits for it finds that it has no name any more, and makes another.
        place.unlink(missing_ok=True)
        lock.release()


def parse_line(text: bytes) -> Any:
    """A line of JSON. Raises ValueError for anything else. Several times as fast as `json`.

    Only `json` reads the lone surrogates that replies may have. NaN is no JSON, and would differ
    from nothing that it is compared with.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return json.loads(text, parse_constant=refuse)
