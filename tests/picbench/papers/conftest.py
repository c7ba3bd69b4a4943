"""A small paper, and engines for it."""

from pathlib import Path

import pytest
import yaml
from paper_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """Two seeds of two points for every figure, over random tokens."""
    point = {"dataset": "synthetic", "requests": 3, "pool": 8, "chunk_tokens": 20, "max_tokens": 4}
    content = {
        "paper": "A paper",
        "published": "mepic.json",
        "model": "testbed",
        "arms": ["mepic", "epic:k=16:copy=private"],
        "subject": "mepic",
        "reference": "epic:k=16:copy=private",
        "kv_blocks": 100,
        "max_running": 8,
        "context": 512,
        "seeds": [1, 2],
        "common": point | {"rate": 50.0},
        "experiments": {
            "workloads": {
                "varies": "workload",
                "points": {"squad": {"chunks": "2"}, "ours": {"chunks": "3"}},
            },
            "rate": {"varies": "arrivals per second", "points": {"5": {"rate": 5.0}, "9": {}}},
            "chunks": {
                "varies": "chunks per request",
                "points": {"2": {"chunks": "2"}, "4": {"chunks": "4"}},
            },
        },
    }
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
