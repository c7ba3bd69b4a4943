"""An independent answer to what a PIC engine must compute.

The oracle takes a request (ordered segments, text or chunk) and a `Rule`, repeats every token once
for each way in which it is computed, and runs Hugging Face's own Llama over that expanded sequence
with an explicit 4-D attention mask and explicit positions:

- Canonical tokens of a chunk see their own chunk, and before it its anchor and the text of its
  document, up to their position. They have their logical positions in the prompt; rotary embeddings
  are relative, so this is the same as compiling at position 0 and re-rotating later. A chunk that
  occurs twice is compiled twice.
- Linked tokens, text and generated tokens see one another and every canonical token that was not
  replaced by a linked one, up to their position.
- The last token of the prompt is always computed, so a chunk that ends it has that token linked.
- CacheBlend (`Blend`) has one mask for the layers that are computed in full, one for the others.
- What a question attends to (`Asked`) is known from a first pass; then it is a rule like any other.

It shares no code with the engine, so that the two agree only if both are right.
"""

from picbench.engines.oracle.model import Oracle, distance, visible
from picbench.engines.oracle.picked import Asked, Blend
from picbench.engines.oracle.rule import (
    ExpandedRow,
    GivenSegment,
    OracleSegment,
    Rule,
    block_attention,
    epic,
    epic_bos,
    epic_zero,
    expand,
    first,
    full,
    kvlink,
    mepic,
    naive,
)

__all__ = [
    "Asked",
    "Blend",
    "ExpandedRow",
    "GivenSegment",
    "Oracle",
    "OracleSegment",
    "Rule",
    "block_attention",
    "distance",
    "epic",
    "epic_bos",
    "epic_zero",
    "expand",
    "first",
    "full",
    "kvlink",
    "mepic",
    "naive",
    "visible",
]
