"""The testbed: six data sets about an invented world, and a small model trained on them.

A run without a network needs only this: `rows` for `data=bundled`, `model_path` for
`model=testbed`, `answer` and `MAX_TOKENS` for that model's replies. Training and the study without
an engine are in `train` and `evaluate`, which need torch; this module does not import it.
"""

from importlib.util import find_spec
from pathlib import Path

from picbench.workloads.synthetic.generate import DATASETS, rows
from picbench.workloads.synthetic.reply import MAX_TOKENS, answer

__all__ = ["DATASETS", "MAX_TOKENS", "answer", "model_path", "rows"]


def model_path() -> Path:
    """The folder of the model in Hugging Face's format.

    It is that of a checkout, or of the package picbench-testbed; without either it has a tokenizer
    and a configuration, and no weights.
    """
    own = Path(__file__).parent / "model"
    package = None if (own / "model.safetensors").exists() else find_spec("picbench_testbed")
    places = package.submodule_search_locations if package else None
    return Path(places[0]) if places else own
