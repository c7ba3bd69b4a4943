"""One process at a time writes a run directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.files import hold, is_held


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
