"""Files that are written whole, and locks."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from errno import EFBIG, EINVAL, EISDIR, ENOENT, ENOSPC
from pathlib import Path
from threading import Thread

import pytest
from full_disk import largest_file

from picbench.errors import ConfigError
from picbench.files import check_place, locked, naming, whole_file, write_json, write_whole
from picbench.store.writer import hold, is_held


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
        with pytest.raises(OSError, match="director") as caught, whole_file(path) as file:
            file.write(b"new")
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)


def test_folders_are_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "no" / "a", b"new")
    write_json(tmp_path / "none" / "either" / "a", {})
    assert (tmp_path / "no" / "a").read_bytes() == b"new"
    with pytest.raises(FileExistsError) as caught:
        write_whole(tmp_path / "no" / "a" / "b", b"new")
    assert caught.value.filename == str(tmp_path / "no" / "a")


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


def test_a_folder_is_held_once(tmp_path: Path) -> None:
    with hold(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(ConfigError, match="another process"), hold(tmp_path):
            pass
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from picbench.store.writer import hold\n"
        f"with hold(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_held(tmp_path)
    process.kill()
    process.communicate()
    assert not is_held(tmp_path)


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": 2, "b": object()})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_file_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    path, order = tmp_path / "x.json", list[str]()

    def other() -> None:
        with locked(path):
            order.append("other")

    with locked(path):
        thread = Thread(target=other)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert not any(tmp_path.iterdir())
