"""Files that are written whole or not at all, and errors that name the file."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EINVAL, ENOSPC, ENOTDIR
from pathlib import Path
from typing import BinaryIO

#: The numbers of errors that say that a disk is full: with room, the same can be written.
FULL_DISK = frozenset({ENOSPC, EDQUOT})


def write_whole(path: Path, content: bytes) -> None:
    """Write a file as `whole_file` does."""
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
