"""Questions in the manner of MuSiQue: two to four hops over up to twenty passages."""

from functools import partial

from picbench.workloads.synthetic.rows.qa_rows import Generator, Sort
from picbench.workloads.synthetic.world.plant import plant_chain
from picbench.workloads.synthetic.world.questions import chain

make = Generator(
    tuple(
        Sort(share, partial(plant_chain, hops=hops), partial(chain, hops=hops))
        for hops, share in ((2, 0.5), (3, 0.3), (4, 0.2))
    ),
    least=6,
    most=20,
)
