"""An independent answer to what a PIC engine must compute.

The oracle takes a request (ordered segments, text or chunk) and a `Rule`, lays every token out
once for each view it is computed in, and runs Hugging Face's own Llama over that expanded
sequence with an explicit 4-D attention mask and explicit positions:

- Canonical tokens of a chunk see their own chunk, and its anchor, up to their position. They
  stand at their logical positions in the prompt; rotary embeddings are relative, so this is the
  same as compiling at position 0 and rotating later. A chunk that occurs twice is compiled twice.
- Linked tokens, text and generated tokens see one another and every canonical token that was
  not replaced by a linked one, up to their position.
- The last token of the prompt is always computed, so a chunk that ends it has that token linked.

It shares no code with the engine: the two may agree only by both being right.
"""

from picbench.engines.oracle.compare import distance
from picbench.engines.oracle.expand import ExpandedRow, OracleSegment, expand
from picbench.engines.oracle.model import Oracle, visible
from picbench.engines.oracle.rule import Rule, epic, epic_zero, first, full, mepic, naive

__all__ = [
    "ExpandedRow",
    "Oracle",
    "OracleSegment",
    "Rule",
    "distance",
    "epic",
    "epic_zero",
    "expand",
    "first",
    "full",
    "mepic",
    "naive",
    "visible",
]
