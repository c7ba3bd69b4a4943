"""What a request links, by its plan: whatever the cache holds."""

from picbench.engines.algorithms import Algorithm
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP, SlotKind
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.workloads.sample import Sample


def planned_links(sample: Sample, algorithm: Algorithm) -> int:
    """Tokens that a request computes besides its text, if no computed block is found in the cache.

    They are recomputed in chunks, or added to the prompt: link tokens, BOS, visible pads.
    """
    given = [
        Segment(s.tokens, chunk=s.kind == "chunk", context=s.context)
        for s in sample.segments
        if s.tokens
    ]
    # Which tokens are added makes no difference to their number.
    layout = LayoutConfig(
        BLOCK_SIZE, pad=algorithm.pads, bos_token=0, documents=algorithm.documents
    )
    plan = lay_out(algorithm.arrange(given, layout), algorithm.plan_chunk, layout)
    return sum(
        kind is SlotKind.LINKED or (kind is SlotKind.PAD and position != GAP)
        for page in plan.computed
        for kind, position in zip(page.kinds, page.positions, strict=True)
    )
