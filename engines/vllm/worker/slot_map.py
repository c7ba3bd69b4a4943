"""By how much keys at rest are turned when they are read.

On a GPU a chunk's keys rest rotated at the positions that they had when the chunk was compiled. A
rotation by the difference moves them to where the chunk stands in a prompt, so they are as
independent of position as unrotated keys, and requests that compile run vLLM's own RoPE unchanged.
"""

from itertools import groupby

from picbench.engines.planning.plan import Plan

#: Where the scheduler leaves a request's turns for the worker, in `SamplingParams.extra_args`.
TURNS = "pic_turns"

#: The slots [start, end) and the positions by which their keys are turned.
Turn = tuple[int, int, int]


def turns(plan: Plan) -> list[Turn]:
    """The turns of a plan's slots, in compute order; slots in no turn are read as they rest."""
    found, start = [], 0
    for turn, run in groupby(plan.placed, key=lambda placed: placed.start - placed.view.anchor):
        end = start + sum(len(view.tokens) for view, _ in run)
        if turn:
            found.append((start, end, turn))
        start = end
    return found
