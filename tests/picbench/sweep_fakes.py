"""A sweep over fake engines and a model whose configuration is known."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness_fakes import Harness, make_sample

from picbench.experiments.sweep import SweepCell, expand, read_sweep
from picbench.run.workload import Workload
from picbench.settings import RunConfig
from picbench.workloads.sample import Sample

#: A block of 16 tokens has 2 layers x 2 heads x 8 elements x keys and values x 4 bytes.
MODEL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "intermediate_size": 64,
    "vocab_size": 128,
    "dtype": "float32",
}
BLOCK_BYTES = 2 * 2 * 8 * 2 * 4 * 16


@dataclass
class SweepHarness(Harness):
    """A harness with a model folder."""

    samples: Sequence[Sample] = field(default_factory=lambda: [make_sample(n) for n in range(6)])
    model: Path = Path()
    loads: int = 0

    def load(self, config: RunConfig) -> Workload:
        self.loads += 1
        (self.model / "config.json").write_text(json.dumps(MODEL))
        workload = super().load(config)
        return replace(workload, model=replace(workload.model, path=self.model))


def make_cells(tmp_path: Path, grid: str) -> list[SweepCell]:
    """The cells of a grid over the fake data set, with the arms full and mepic."""
    path = tmp_path / "fake.yaml"
    path.write_text(f"base: {{dataset: fake, algo: [full, mepic]}}\ngrid: {grid}\n")
    return expand(path, read_sweep(path), tmp_path / "out")
