"""Files that are written whole or not at all, and errors that name the file."""

import os
from concurrent.futures import ThreadPoolExecutor
from errno import EFBIG, EINVAL, EISDIR, ENOENT, ENOSPC
from pathlib import Path

import pytest
from full_disk import largest_file

from picbench.files import check_place, naming, whole_file, write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"old and longer", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    too_large = pytest.raises(OSError, match="too large")
    with largest_file(100), too_large as caught, whole_file(path, durable=durable) as file:
        file.write(b"new" * 100)
    assert (caught.value.errno, caught.value.filename) == (EFBIG, str(path))
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_the_old_file_is_there_until_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_threads_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contents = [bytes([n]) * (1 << 16) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            [*pool.map(lambda content: write_whole(path, content), contents)]
    assert path.read_bytes() in contents
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


def test_errors_name_the_file_and_not_its_draft(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "a"):
        with pytest.raises(OSError, match="director") as caught:
            write_whole(path, b"new")
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)


def test_only_errors_without_a_file_get_a_name() -> None:
    path, no_space = Path("/dev/full"), pytest.raises(OSError, match="No space")
    with no_space as caught, naming(path), path.open("wb") as file:
        file.write(b"a")
    assert (caught.value.errno, caught.value.filename) == (ENOSPC, str(path))
    with pytest.raises(FileNotFoundError) as caught, naming(Path("a")):
        raise FileNotFoundError(ENOENT, "no such file", "other")
    assert caught.value.filename == "other"
    with pytest.raises(OSError, match=r"^said in words$"), naming(Path("a")):
        raise OSError("said in words")


def test_a_place_below_a_file_can_never_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for path in (tmp_path, tmp_path / "new" / "a", file, Path("a"), Path()):
        check_place(path)
    file.write_text("")
    check_place(file)
    for path in (file / "a", file / "a" / "b"):
        with pytest.raises(NotADirectoryError) as caught:
            check_place(path)
        assert caught.value.filename == str(path)
