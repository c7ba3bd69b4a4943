"""Files that are written whole or not at all."""

import os
from errno import EINVAL
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of one.

    Processes that write the same file do not meet. Raises OSError where it cannot be written, and
    for what is no regular file, such as a device, which would be replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(EINVAL, "not a regular file", str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
