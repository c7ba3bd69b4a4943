"""Score the testbed model and its variants, and write the model card.

    python -m picbench.workloads.testbed.evaluate [--model DIR] [--rows N]

Every claim of the card comes from this command: it writes DIR/scores.json and DIR/README.md.
"""

import argparse
import json
from pathlib import Path
from types import MappingProxyType

import torch

from picbench.workloads.testbed import model_path
from picbench.workloads.testbed.card import card
from picbench.workloads.testbed.lm.files import load, write_json
from picbench.workloads.testbed.lm.judge import Judge
from picbench.workloads.testbed.lm.pic import ARMS, FULL, KVLINK, NAIVE

#: What each model is scored under.
ARMS_OF = MappingProxyType({"base": ARMS, "block": (FULL, NAIVE), "link": (FULL, KVLINK)})


def evaluate(folder: Path, count: int) -> None:
    """Score the models in a folder on the first `count` rows of every data set, on a GPU if any."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores = {}
    for variant, arms in ARMS_OF.items():
        model, tokenizer = load(folder, device, None if variant == "base" else variant)
        scores[variant] = Judge(model, tokenizer).table(arms, count)
    write_json(folder / "scores.json", {"rows": count, "device": device.type, "scores": scores})
    write_card(folder)


def write_card(folder: Path) -> None:
    """Write the model card from what training and evaluation noted down."""
    notes = (json.loads((folder / name).read_text("utf-8")) for name in _NOTES)
    (folder / "README.md").write_text(card(*notes), encoding="utf-8")


_NOTES = ("config.json", "training.json", "scores.json")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and evaluate."""
    parser = argparse.ArgumentParser(description="Score the testbed model and its variants")
    parser.add_argument("--model", type=Path, default=model_path(), help="the model folder")
    parser.add_argument("--rows", type=int, default=200, help="rows of every data set")
    options = parser.parse_args(argv)
    evaluate(options.model, options.rows)


if __name__ == "__main__":
    main()
