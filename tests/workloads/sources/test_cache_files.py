"""Files of the user's cache."""

from pathlib import Path

import pytest
from full_disk import largest_file

from picbench.workloads.sources.cache_files import write_rows


def test_rows_that_do_not_fit_are_not_there(tmp_path: Path) -> None:
    rows = [{"text": "a" * 1000}]
    with largest_file(500), pytest.raises(OSError, match="too large") as caught:
        write_rows("rows", rows, tmp_path / "new")
    assert str(caught.value.filename).endswith(".jsonl")
    assert list((tmp_path / "new").iterdir()) == []
    assert write_rows("rows", rows, tmp_path / "new").stat().st_size > 1000
