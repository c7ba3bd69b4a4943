"""Questions in the manner of 2WikiMultihopQA: bridge, inference and comparison."""

from functools import partial

from picbench.workloads.synthetic.rows.qa_rows import Generator, Sort
from picbench.workloads.synthetic.world.plant import (
    plant_bridge_comparison,
    plant_chain,
    plant_comparison,
    plant_kinship,
)
from picbench.workloads.synthetic.world.questions import (
    bridge_comparison,
    chain,
    comparison,
    kinship,
)

make = Generator(
    (
        Sort(0.5, partial(plant_chain, hops=2), partial(chain, hops=2)),
        Sort(0.38, plant_kinship, kinship),
        Sort(0.06, plant_comparison, comparison),
        Sort(0.06, plant_bridge_comparison, bridge_comparison),
    ),
    least=6,
    most=10,
)
