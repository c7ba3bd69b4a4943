"""A small paper, and engines for it."""

from pathlib import Path

import pytest
import yaml
from paper_bench import Bench

#: Two seeds of two points for every figure, over random tokens.
PAPER = """
paper: A paper
published: mepic.json
loads:
  workloads:
    varies: workload
    cpu: &load
      model: testbed
      arms: [mepic, "epic:k=16:copy=private"]
      kv_blocks: 100
      max_running: 8
      context: 512
      seeds: [1, 2]
      common:
        {dataset: synthetic, requests: 3, pool: 8, chunk_tokens: 20, max_tokens: 4, rate: 50.0}
      points: {squad: {chunks: "2"}, ours: {chunks: "3"}}
  chunks:
    varies: chunks per request
    cpu: {<<: *load, points: {"2": {chunks: "2"}, "4": {chunks: "4"}}}
figures:
  table1: {title: Table 1, experiment: workloads}
  table2:
    title: Table 2
    experiment: workloads
    drawings:
      - {name: table2-memory, kind: dots, metric: peak_pct, label: "KV, %", printed: peak_pct}
  fig6:
    title: Figure 6
    experiment: workloads
    drawings: [{name: fig6, kind: time, label: "KV held, % of pool"}]
  fig8:
    title: Figure 8
    experiment: chunks
    drawings: [{name: fig8, kind: lines, metric: peak_pct, label: "peak KV, % of pool"}]
claims:
  - &five
    claim: five times
    source: Figure 8
    published: 2.97 to 5.21x
    judge: &over
      kind: run
      experiment: chunks
      metric: peak_blocks
      arm: "epic:k=16"
      over: mepic
      least: 4.9
  - {<<: *five, claim: six times, judge: {<<: *over, least: 6}}
  - {<<: *five, claim: full, judge: {<<: *over, arm: prefix, over: [], least: 1}}
  - {<<: *five, claim: maps, judge: {kind: none, why: nothing draws them}}
"""


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(PAPER), sort_keys=False))
    return path
