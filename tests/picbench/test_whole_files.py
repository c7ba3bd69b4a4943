"""Files that are written whole or not at all."""

import os
from errno import EINVAL, EISDIR
from pathlib import Path

import pytest

from picbench.whole_files import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"old and longer", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert [*tmp_path.iterdir()] == [path]


def test_what_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")

    def fail(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_what_is_no_regular_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file") as caught:
        write_whole(pipe, b"new")
    assert caught.value.errno == EINVAL
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError) as caught:
        write_whole(tmp_path, b"new")
    assert caught.value.errno == EISDIR
