"""The documentation as a site: it builds without a warning, and its menu has every page."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def pages(entry: object) -> list[str]:
    """The pages of a menu."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, (list, type({}.values())))
    return [page for part in parts for page in pages(part)]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    subprocess.run(["make", "--silent", "pages"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    assert "Position-independent" in (tmp_path / "index.html").read_text()


def test_the_menu_has_every_page() -> None:
    menu = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(page for page in menu if page.startswith("docs/")) == sorted(
        f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")
    )
