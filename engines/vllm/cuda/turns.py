"""By how much keys at rest are turned when they are read.

On a GPU a chunk's keys rest rotated at the positions that they had when the chunk was compiled. A
rotation by the difference moves them to where the chunk stands in a prompt, so they are as
independent of position as unrotated keys, and requests that compile run vLLM's own RoPE unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from picbench.engines.keys import Key
from picbench.engines.plan import GAP, Page, Plan

#: Where the scheduler leaves a request's turns for the worker, in `SamplingParams.extra_args`.
TURNS = "pic_turns"

#: The slots [start, end) and the positions by which their keys are turned.
Turn = tuple[int, int, int]


def turns(plan: Plan) -> list[Turn]:
    """The turns of a plan's slots, in compute order; slots in no turn are read as they rest."""
    rests = {page.key: page.positions for c in plan.canonicals for page in c.pages}
    return list(_runs((page, _turn(page, rests)) for page in plan.pages))


def _turn(page: Page, rests: Mapping[Key | None, Sequence[int]]) -> int:
    """The turn of a page; it is the same for all of its visible slots."""
    rest = rests.get(page.copy_of or page.key) if page.canonical else None
    if rest is None:
        return 0
    for here, there in zip(page.positions, rest, strict=True):
        if here != GAP:
            return here - there
    return 0


def _runs(pages: Iterable[tuple[Page, int]]) -> Iterator[Turn]:
    start = 0
    for turn, run in groupby(pages, key=lambda pair: pair[1]):
        end = start + sum(len(page.positions) for page, _ in run)
        if turn:
            yield start, end, turn
        start = end
