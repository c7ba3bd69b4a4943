"""Score the testbed model and its variants, and write the model card.

    python -m picbench.workloads.testbed.evaluate [--model DIR] [--rows N] [--only VARIANT ...]

Every score of the card comes from this command: it writes DIR/scores.json and DIR/README.md.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from picbench.files import write_json
from picbench.workloads.testbed import DATASETS, model_path
from picbench.workloads.testbed.judge import Judge, chance
from picbench.workloads.testbed.model_files import device_name, load
from picbench.workloads.testbed.pic import ARMS, FULL, KVLINK, NAIVE
from picbench.workloads.testbed.prompt import LINKS_EACH

#: What each model is scored under.
ARMS_OF = MappingProxyType({"base": ARMS, "block": (FULL, NAIVE), "link": (FULL, KVLINK)})
#: The arm that a variant was tuned for.
_OWN_ARM = MappingProxyType({"block": "naive", "link": "kvlink"})
#: What the card is made of.
_NOTES = ("config.json", "training.json", "scores.json")

_ABOUT = """# The testbed model

A Llama of {layers} layers, width {width} and {context} positions, trained for one purpose: to make
accuracy mean something where no real model can be downloaded. It reads English about an invented
world and nothing else. Numbers from it are about algorithms that reuse keys and values;
they say nothing about how well any real model answers questions.

It restates what it looks up ("director of X is Y; home of Y is Z"), so its replies need more
tokens than the answers, and are read by `picbench.workloads.testbed.answer`.

## Data
Generated rows for six data sets, in LongBench's schema and with picbench's own prompts, from
`picbench.workloads.testbed.rows`: no text of any real data set. Every row has a world of its own.
Names belong to the train, validation or test split by a hash, so no entity of a test row was
seen in training; vocabulary (trades, years, languages) is shared.

What makes reuse hard here: many accounts are cut into two passages, of which the second leaves it
to the first to say whom or what it is about, as happens when documents are split. A model that
reads the whole prompt settles that while reading. Keys and values of the second passage that were
computed alone lack it, and the more of its first tokens are computed again, the more comes back.
Needle texts have sections under names, news items have follow-ups, and the examples of a
few-shot prompt agree on a style.

What it cannot show: its chunks have no attention sinks. Where chunks are compiled alone, their
first tokens draw 3 % of the question's attention to chunks, in SmolLM2-135M, trained on real text,
48 % (`picbench measure sinks`). What recomputing these tokens is worth there is lost here.

## Training
Muon on the matrices, AdamW on the rest, a curriculum from 2 short passages to full contexts, many
questions to a context, replies weighted up in the loss. The variants are low-rank deltas in eight
bits: `block.delta` was trained with isolated chunks in half of every batch (Block-Attention),
`link.delta` with isolated chunks and {links} trained link tokens after each (KVLink).

"""
_COMMANDS = """
    python results/testbed/train/train.py base|block|link --out DIR
    python -m picbench.workloads.testbed.evaluate --model DIR

The same training command again resumes from the last checkpoint; DIR/<variant>.log.jsonl has the
losses, with and without isolated chunks, and tokens a second.

## Scores
Mean over the first test rows of every data set: word F1, for samsum and multi_news rouge-l. One
greedy reply to a row, in torch with an explicit mask, without any engine. `mepic` computes the
first block of every chunk again, `epic-k` the first k tokens of every chunk but the first;
`anchored` chunks were compiled after the prompt's head; `kept` is the share of the full score that
is left. `shuffled` takes the keys and values of each chunk from another request, and `chance` is
the score of another row's right answer: two summaries share words, so shuffled chunks cannot
bring rouge-l far below chance. samsum's chat is in the question, as in the real set, and not
in a chunk; its chunks only show the style, which survives in every chunk alone, so on samsum
neither reuse nor shuffling costs what it costs elsewhere.
"""


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


def card(config: Mapping[str, Any], training: Mapping[str, Any], scores: Mapping[str, Any]) -> str:
    """Render the card from ``config.json``, ``training.json`` and ``scores.json``."""
    about = _ABOUT.format(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        context=config["max_position_embeddings"],
        links=LINKS_EACH,
    )
    tables = (_scores(variant, found) for variant, found in scores.items())
    return about + _budget(training) + _COMMANDS + "".join(tables)


def _budget(training: Mapping[str, Any]) -> str:
    rows = (
        (
            variant,
            str(took["steps"]),
            f"{took['tokens'] / 1e6:.0f} M",
            f"{took['seconds']:.0f} s",
            took["device"],
            took["torch"],
        )
        for variant, took in training.items()
    )
    return _table(("variant", "steps", "tokens", "time", "device", "torch"), rows)


def _scores(variant: str, found: Mapping[str, Any]) -> str:
    arms = found["arms"]
    rows = [(arm, *(f"{score[name]:.3f}" for name in DATASETS)) for arm, score in arms.items()]
    if variant in _OWN_ARM:
        full, own = arms["full"], arms[_OWN_ARM[variant]]
        rows.append(("kept", *(f"{own[name] / full[name]:.1%}" for name in DATASETS)))
    title = f"\n{found['rows']} rows each, {found['dtype']}, {found['device']}:\n\n"
    return title + _table((variant, *DATASETS), rows)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(header)
    lines = (titles, ("---",) * len(titles), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
