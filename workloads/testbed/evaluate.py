"""Score the testbed model and its variants, and write the model card.

    python -m picbench.workloads.testbed.evaluate [--model DIR] [--rows N] [--only VARIANT ...]

Every score of the card comes from this command: it writes DIR/scores.json and DIR/README.md.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from picbench.workloads.testbed import model_path
from picbench.workloads.testbed.card import card
from picbench.workloads.testbed.lm.files import device_name, load, write_json
from picbench.workloads.testbed.lm.judge import Judge, chance
from picbench.workloads.testbed.lm.pic import ARMS, FULL, KVLINK, NAIVE

#: What each model is scored under.
ARMS_OF = MappingProxyType({"base": ARMS, "block": (FULL, NAIVE), "link": (FULL, KVLINK)})


def evaluate(folder: Path, count: int, variants: Sequence[str] = tuple(ARMS_OF)) -> None:
    """Score models of a folder on the first `count` rows of every data set, on a GPU if any.

    Existing scores of other variants are kept.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    noted = _noted(folder)
    for variant in variants:
        model, tokenizer = load(folder, device, None if variant == "base" else variant)
        noted[variant] = {
            "rows": count,
            "device": device_name(device),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "arms": Judge(model, tokenizer).table(ARMS_OF[variant], count),
        }
        if variant == "base":
            noted[variant]["arms"]["chance"] = chance(count)
        write_json(folder / "scores.json", {name: noted[name] for name in ARMS_OF if name in noted})
    write_card(folder)


def write_card(folder: Path) -> None:
    """Write the model card from what training and evaluation noted down."""
    notes = (json.loads((folder / name).read_text("utf-8")) for name in _NOTES)
    (folder / "README.md").write_text(card(*notes), encoding="utf-8")


def _noted(folder: Path) -> dict[str, Any]:
    file = folder / "scores.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


_NOTES = ("config.json", "training.json", "scores.json")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and evaluate."""
    parser = argparse.ArgumentParser(description="Score the testbed model and its variants")
    parser.add_argument("--model", type=Path, default=model_path(), help="the model folder")
    parser.add_argument("--rows", type=int, default=200, help="rows of every data set")
    parser.add_argument("--only", nargs="+", choices=list(ARMS_OF), default=list(ARMS_OF))
    options = parser.parse_args(argv)
    evaluate(options.model, options.rows, options.only)


if __name__ == "__main__":
    main()
