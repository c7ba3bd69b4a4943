from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.workloads.sources.hub import LONGBENCH, Archive, parse
from picbench.workloads.sources.source import RowSource, locate


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.touch()
    assert locate(str(tmp_path), "musique") == RowSource(tmp_path)
    assert locate(str(file), "musique") == RowSource(file)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`data` nowhere: no such.*hub or bundled"):
        locate("nowhere", "musique")


def test_hub_is_longbench_at_a_pinned_commit() -> None:
    assert parse("hub") == LONGBENCH
    assert len(LONGBENCH.revision) == 40
    assert LONGBENCH.sha256 is not None


def test_other_repositories_are_not_pinned() -> None:
    assert parse("hub:me/copy") == Archive("me/copy", "main")
    assert parse("hub:me/copy@v2") == Archive("me/copy", "v2")


@pytest.mark.parametrize("data", ["hub:", "hub:copy", "hub:me/", "hub:/copy", "hub:a/b/c"])
def test_a_repository_needs_an_owner_and_a_name(data: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        locate(data, "musique")


def test_needle_is_not_on_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"no rows for 'needle'.*`data=DIR`"):
        locate("hub", "needle")
