"""Questions in the manner of HotpotQA: two gold passages among ten, spans, yes or no."""

from functools import partial
from random import Random

from picbench.workloads.synthetic.rows.qa_rows import Generator, Sort
from picbench.workloads.synthetic.world.plant import plant_chain, plant_comparison, plant_same
from picbench.workloads.synthetic.world.questions import Question, chain, comparison, same
from picbench.workloads.synthetic.world.stated import StatedFacts


def _either(rng: Random, stated: StatedFacts) -> Question | None:
    return same(rng, stated, wanted=rng.random() < 0.5)


make = Generator(
    (
        Sort(0.9, partial(plant_chain, hops=2), partial(chain, hops=2)),
        Sort(0.05, plant_comparison, comparison),
        Sort(0.05, plant_same, _either),
    ),
    least=8,
    most=10,
)
