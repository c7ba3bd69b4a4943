"""A disk tier after crashes, on a full disk, and shared by processes."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held import held

from picbench.engines.chunk_cache.tiers.backends.disk import Disk
from picbench.engines.chunk_cache.tiers.envelope import seal
from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.tier import TierSpec, pageable
from picbench.errors import ConfigError

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
CAPACITY = 1 << 20

_PRELUDE = """
import os, resource, sqlite3, sys
from pathlib import Path
from picbench.engines.chunk_cache.tiers.backends.disk import Disk
tier = Disk(Path(sys.argv[1]), 1 << 20)
A, B = b"a" * 32, b"b" * 32
held = lambda: tier._index._connection.execute("SELECT objects, bytes FROM total").fetchone()
"""


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + body, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


def value_file(folder: Path, key: bytes) -> Path:
    (path,) = folder.glob(f"values/*/{key.hex()}")
    return path


def files(folder: Path) -> list[str]:
    return [path.name for name in ("values/*/*", "partial/*") for path in folder.glob(name)]


CRASHES = {
    "in the middle of writing": """
real = os.write
def write(descriptor, data):
    real(descriptor, data[: len(data) // 2])
    os._exit(9)
os.write = write
""",
    "between writing and renaming": "Path.replace = lambda *_: os._exit(9)",
    "between renaming and publishing": "tier._index.publish = lambda key: os._exit(9)",
}


@pytest.mark.parametrize("moment", CRASHES)
def test_a_crash_leaves_no_value_and_no_litter(moment: str, tmp_path: Path) -> None:
    body = f"tier.put([(A, b'whole')])\n{CRASHES[moment]}\ntier.put([(B, bytes(1000))])"
    assert run(tmp_path, body).returncode == 9
    tier = Disk(tmp_path, CAPACITY)
    assert tier.get([A, B]) == [b"whole", None]
    assert tier.exists([B]) == [False]
    assert not list(tmp_path.glob("partial/*"))
    assert tier.put([(B, b"again")]) == [True]
    assert tier.get([B]) == [b"again"]
    assert held(tier)[1] == len("whole" + "again")
    tier.close()


def test_space_that_a_crash_reserved_is_evicted(tmp_path: Path) -> None:
    body = "tier._index.publish = lambda key: os._exit(9)\ntier.put([(B, bytes(900_000))])"
    run(tmp_path, body)
    tier = Disk(tmp_path, CAPACITY)
    assert tier.put([(A, bytes(900_000))]) == [True]
    assert held(tier)[0] == 1
    assert files(tmp_path) == [A.hex()]
    tier.close()


def test_killed_at_any_time_every_value_is_whole(tmp_path: Path) -> None:
    body = """
print("ready", flush=True)
for i in range(10**9):
    tier.put([(bytes([i % 7]) * 32, bytes([i % 7]) * 150_000)])
"""
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + body, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        reader = Disk(tmp_path, CAPACITY)
        while not reader.exists([bytes([2]) * 32])[0]:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        reader.close()
        tier = Disk(tmp_path, CAPACITY)
        found = tier.get([bytes([i]) * 32 for i in range(7)])
        assert any(found)
        assert all(value in (None, bytes([i]) * 150_000) for i, value in enumerate(found))
        assert not list(tmp_path.glob("partial/*"))
        tier.delete([bytes([i]) * 32 for i in range(7)])
        tier.close()


def test_a_file_that_is_removed_before_it_is_locked_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Disk(tmp_path, CAPACITY)
    lock, opened = fcntl.flock, []

    def first_opens_the_folder(file: Any, how: int) -> None:
        if not opened:
            opened.append(True)
            Disk(tmp_path, CAPACITY).close()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", first_opens_the_folder)
    assert tier.put([(A, b"whole")]) == [True]
    assert tier.get([A]) == [b"whole"]
    assert not list(tmp_path.glob("partial/*"))
    tier.close()


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    Disk(tmp_path, CAPACITY).close()
    partial = tmp_path / "partial" / "theirs"
    with partial.open("wb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        Disk(tmp_path, CAPACITY).close()
        assert partial.exists()
    Disk(tmp_path, CAPACITY).close()
    assert not partial.exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_file_is_missing_and_removed(damage: str, tmp_path: Path) -> None:
    tier = Disk(tmp_path, CAPACITY)
    guarded = GuardedTier(tier)
    guarded.put([(A, seal(A, bytes(5000))), (B, seal(B, b"good"))])
    path = value_file(tmp_path, A)
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    contents = {"cut": data[:4000], "flip": data, "empty": b"", "foreign": seal(B, bytes(5000))}
    path.write_bytes(contents[damage])
    nothing, good = guarded.get([A, B])
    assert nothing is None
    assert good is not None
    assert guarded.counters().corrupt == 1
    assert not path.exists()
    assert guarded.exists([A]) == [False]
    tier.close()


def test_a_file_that_somebody_removed_is_missing_and_its_space_free(tmp_path: Path) -> None:
    tier = Disk(tmp_path, CAPACITY)
    tier.put([(A, b"value")])
    value_file(tmp_path, A).unlink()
    assert tier.get([A]) == [None]
    assert held(tier)[1] == 0
    tier.close()


@pytest.mark.parametrize("damage", ["missing", "junk"])
def test_values_outlive_their_index(damage: str, tmp_path: Path) -> None:
    tier = Disk(tmp_path, CAPACITY)
    tier.put([(key, key) for key in (A, B, C)])
    tier.close()
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    if damage == "junk":
        (tmp_path / "index.sqlite").write_bytes(os.urandom(8192))
    tier = Disk(tmp_path, CAPACITY)
    assert tier.get([A, B, C]) == [A, B, C]
    assert held(tier)[1] == 96
    tier.close()


def test_any_page_of_an_index_may_be_damaged(tmp_path: Path) -> None:
    keys = [bytes([n]) * 32 for n in range(200)]
    with closing(Disk(tmp_path, CAPACITY)) as tier:
        tier.put([(key, key) for key in keys])
    index = tmp_path / "index.sqlite"
    whole = index.read_bytes()
    for page in range(len(whole) // 4096):
        for path in tmp_path.glob("index.sqlite-*"):
            path.unlink()
        begin = 4096 * page
        index.write_bytes(whole[:begin] + b"\xff" * 4096 + whole[begin + 4096 :])
        with closing(Disk(tmp_path, CAPACITY)) as tier:
            assert tier.get(keys) == keys


def test_a_file_that_is_removed_while_a_folder_is_opened_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Disk(tmp_path, CAPACITY)
    assert tier.put([(A, b"1234"), (B, b"5678")]) == [True, True]
    tier._index.remove([A, B])
    gone, real = value_file(tmp_path, A), Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self == gone:
            self.unlink(missing_ok=True)
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert Disk(tmp_path, CAPACITY).exists([A, B]) == [False, True]


def test_a_folder_that_others_create_at_the_same_time_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite says at once, without waiting, that others switch the file to its journal."""
    busy = [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY]

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if busy and "journal_mode" in sql:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = busy.pop()
                raise error
            return super().execute(sql, *args)

    connect = partial(sqlite3.connect, factory=Connection)
    monkeypatch.setattr(sqlite3, "connect", connect)
    tier = Disk(tmp_path, CAPACITY)
    assert not busy
    assert tier.put([(A, b"value")]) == [True]
    tier.close()


def test_what_is_no_file_is_no_value(tmp_path: Path) -> None:
    """It could be neither read nor evicted, and the tier would fail for ever."""
    folder = tmp_path / "values" / A.hex()[-2:] / A.hex()
    folder.mkdir(parents=True)
    tier = Disk(tmp_path, 100)
    assert tier.exists([A]) == [False]
    assert tier.put([(B, bytes(90)), (C, bytes(90))]) == [True, True]
    assert held(tier)[0] == 1
    tier.close()


def test_processes_keep_one_bound_together(tmp_path: Path) -> None:
    mine, theirs = Disk(tmp_path, 100), Disk(tmp_path, 100)
    mine.put([(A, bytes(40))])
    theirs.put([(B, bytes(40))])
    assert mine.get([A, B]) == [bytes(40), bytes(40)]
    theirs.get([A])
    mine.put([(C, bytes(40))])
    assert theirs.exists([A, B, C]) == [True, False, True]
    assert held(theirs)[1] == 80
    assert len(files(tmp_path)) == 2
    mine.close()
    theirs.close()


def test_a_value_that_is_evicted_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = Disk(tmp_path, 100), Disk(tmp_path, 100)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        theirs.put([(B, bytes(90))])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert mine.put([(A, bytes(90))]) == [False]
    assert files(tmp_path) == [B.hex()]
    assert held(mine)[1] == 90
    mine.close()
    theirs.close()


def test_a_full_disk_keeps_nothing_of_a_value_and_goes_on(tmp_path: Path) -> None:
    # The kernel refuses the real write once the file reaches the limit.
    body = """
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
print(tier.put([(A, bytes(500_000)), (B, b"small")]))
print(tier.get([A, B]), held()[1])
"""
    result = run(tmp_path, body)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["[False, True]", "[None, b'small'] 5"]
    assert files(tmp_path) == [B.hex()]


def test_a_disk_without_any_room_is_read(tmp_path: Path) -> None:
    """Neither values nor the index can grow, so that not even the use of a value is noted."""
    body = """
tier.put([(A, b"value")])
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
for _ in range(2):
    print(tier.exists([A, B]), tier.get([A, B]), held()[0])
    try:
        tier.put([(B, b"more")])
    except (OSError, sqlite3.OperationalError):
        print("raised")
"""
    result = run(tmp_path, body)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["[True, False] [b'value', None] 1", "raised"] * 2
    assert files(tmp_path) == [A.hex()]


def test_a_full_disk_says_so_if_it_keeps_nothing(tmp_path: Path) -> None:
    body = """
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    tier.put([(A, bytes(500_000)), (B, bytes(500_000))])
except OSError as error:
    print(error.strerror, held()[1])
"""
    result = run(tmp_path, body)
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["File too large 0"]


def test_an_index_that_cannot_be_written_to_is_read(tmp_path: Path) -> None:
    tier = Disk(tmp_path, CAPACITY)
    tier.put([(A, b"first"), (B, b"second")])
    value_file(tmp_path, B).unlink()
    tier._index._connection.execute("PRAGMA query_only = 1")
    for _ in range(2):
        assert tier.exists([A, C]) == [True, False]
        assert tier.get([A, B, C]) == [b"first", None, None]
        assert held(tier)[0] == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            tier.put([(C, b"third")])
    assert files(tmp_path) == [A.hex()]
    tier.close()


def test_an_error_that_is_not_about_space_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Disk(tmp_path, CAPACITY)

    def fsync(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        tier.put([(A, b"value")])
    assert files(tmp_path) == []
    assert held(tier)[1] == 0
    tier.close()


@pytest.mark.parametrize(
    ("location", "capacity", "problem"),
    [
        ("", 100, "a folder is missing"),
        ("FILE/x", 100, "cannot use"),
        ("x", None, "capacity"),
        ("y", 100, "cannot use"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_clear_line(
    location: str, capacity: int | None, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text("a file")
    (tmp_path / "y" / "index.sqlite").mkdir(parents=True)
    place = str(tmp_path / location) if location else ""
    spec = TierSpec("disk", place, capacity, text="disk:...")
    with pytest.raises(ConfigError, match=f"`tiers` disk:....*{problem}"):
        Disk.open(spec, pageable)


@pytest.mark.parametrize(
    "asked",
    [Disk.check, Disk.probe, partial(Disk.open, allocate=pageable)],
    ids=["check", "probe", "open"],
)
def test_a_home_without_a_user_is_refused(asked: Callable[[TierSpec], object]) -> None:
    spec = TierSpec("disk", "~nosuchuser/kv", CAPACITY, text="disk:...")
    with pytest.raises(ConfigError, match=r"cannot use the folder: .*home directory"):
        asked(spec)
