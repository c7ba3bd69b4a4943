"""What a load is expected to take."""

from dataclasses import replace

import pytest

from picbench.papers.data import expected_arm
from picbench.workloads.traffic.traffic_facts import TrafficFacts

FACTS = TrafficFacts(
    requests=10,
    users=1,
    mean_tokens=1000.0,
    mean_chunks=10.0,
    mean_chunk_tokens=100.0,
    unique_chunks=10,
    reuse=0.0,
    fresh_tokens=100.0,
    cached=0.0,
    top_chunk=0.1,
    rate=None,
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_recurs_takes_less_time_than_what_is_new(device: str) -> None:
    new, known = (replace(FACTS, fresh_tokens=fresh) for fresh in (1000.0, 100.0))
    for arm in ("mepic", "epic:k=16", "cacheblend:r=0.15", "naive"):
        assert expected_arm(arm, known, device) < expected_arm(arm, new, device)
    assert expected_arm("prefix", known, device) == expected_arm("prefix", new, device)
    late = replace(known, rate=0.1)
    assert expected_arm("naive", late, device) == 100.0
