"""`picbench measure break-even`: what it says before it measures anything."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from picbench.cli import main

FLAGS = ("measure", "break-even", "--device", "cuda", "--dry-run", "--output")


def said(tmp_path: Path, *flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*FLAGS, str(tmp_path / "none"), *flags])
    return done.exit_code, done.output


def test_parts_are_the_whole(tmp_path: Path) -> None:
    whole, *parts = (said(tmp_path, "--part", part) for part in ("1/1", "1/2", "2/2"))
    counts = [int(text.split(" cells")[0].split()[-1]) for _, text in (whole, *parts)]
    assert counts[0] == counts[1] + counts[2]
    assert whole[0] == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("part", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(tmp_path: Path, part: str) -> None:
    code, text = said(tmp_path, "--part", part)
    assert code == 2
    assert "not like 1/2" in text
