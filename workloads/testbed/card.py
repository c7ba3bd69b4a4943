"""The model card: what the model is, what it was trained on, what it scores."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from picbench.workloads.synthetic.generate import DATASETS
from picbench.workloads.testbed.lm.recipes import LINKS_EACH

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

## Training
Muon on the matrices, AdamW on the rest, a curriculum from 2 short passages to full contexts, many
questions to a context, replies weighted up in the loss. The variants are low-rank deltas in eight
bits: `block.delta` was trained with isolated chunks in half of every batch (Block-Attention),
`link.delta` with isolated chunks and {links} trained link tokens after each (KVLink).

"""
_COMMANDS = """
    python -m picbench.workloads.testbed.train base|block|link --out DIR
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


#: The arm that a variant was tuned for.
_OWN_ARM = MappingProxyType({"block": "naive", "link": "kvlink"})


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
