"""The benchmark measures every tier it is given, and refuses numbers of tiers that lose values."""

import json
from pathlib import Path

from click.testing import CliRunner

from picbench.cli import main


def test_a_table_and_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out" / "tiers.json"
    tiers = f"host:4MiB,disk:{tmp_path}:4MiB"
    options = ["--tiers", tiers, "--sizes", "4KiB,64KiB", "--batch", "128KiB", "--rounds", "2"]
    result = CliRunner().invoke(main, ["measure", "tiers", *options, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 2 + 4
    rows = json.loads(output.read_text())["rows"]
    measured = [(row["tier"], row["nbytes"], row["values"]) for row in rows]
    assert measured == [(kind, n << 10, 128 // n) for kind in ("host", "disk") for n in (4, 64)]
    assert all(row["store"]["slowest"] <= row["store"]["median"] for row in rows)


def test_a_tier_that_loses_values_is_no_measurement() -> None:
    flags = ["--tiers", "host:64KiB", "--sizes", "48KiB", "--batch", "96KiB"]
    result = CliRunner().invoke(main, ["measure", "tiers", *flags])
    assert result.exit_code == 3
    assert "of some batches in --tiers" in result.output
