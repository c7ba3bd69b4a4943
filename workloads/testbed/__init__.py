"""The testbed: six data sets about an invented world, and a small model trained on them.

A run without a network needs only this: `rows` for `data=bundled`, `model_path` for
`model=testbed`, `answer` and `MAX_TOKENS` for that model's replies. Training and the study without
an engine are in `train` and `evaluate`, which need torch; this module does not import it.
"""

from pathlib import Path
from typing import Literal

from picbench.workloads.synthetic.generate import DATASETS, rows
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer

__all__ = ["DATASETS", "MAX_TOKENS", "Variant", "answer", "model_path", "rows"]

#: Block-tuned (Block-Attention) and link-tuned (KVLink) deltas of the model.
Variant = Literal["block", "link"]


def model_path(variant: Variant | None = None) -> Path:
    """Return the folder of the model in Hugging Face's format.

    The model is part of the package; a variant is built in the user's cache, which needs torch.
    Raises ConfigError when it cannot be written there.
    """
    folder = Path(__file__).parent / "model"
    if variant is None:
        return folder
    from picbench.workloads.testbed.variants import build_variant

    return build_variant(folder, variant)
