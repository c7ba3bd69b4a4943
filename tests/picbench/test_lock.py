"""One process at a time writes a run directory or a shared file; JSON is written whole."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from picbench.errors import ConfigError
from picbench.files import hold, is_held, locked, write_json


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
        "from picbench.files import hold\n"
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
    assert json.loads(path.read_text()) == {"a": 1}


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})


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
