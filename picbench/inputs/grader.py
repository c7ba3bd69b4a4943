"""How the replies to a data set's questions are scored."""

from collections.abc import Sequence
from functools import partial

from picbench.output.sample_row import Grader
from picbench.workloads import datasets, models
from picbench.workloads.datasets import Dataset
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.scoring import Rule, Scorer, find_scorer
from picbench.workloads.synthetic.reply import answer
from picbench.workloads.traffic.corpus import SYNTHETIC


def find_grader(
    dataset: str, rule: Rule, model: models.ModelSpec, tokenizer: Tokenizer
) -> tuple[str, Grader]:
    """The metric of a data set's replies, and the grader of them.

    Raises ConfigError where a package is missing.
    """
    if dataset == SYNTHETIC:
        return "score", Grader(_unscored)
    found = datasets.find(dataset)
    scorer = find_scorer(found, rule, lambda: tokenizer)
    return scorer.metric, make_grader(found, scorer, restates=model.restates)


def make_grader(dataset: Dataset, scorer: Scorer, *, restates: bool) -> Grader:
    """The grader of a data set's replies; of those that restate facts it takes the answer."""
    if not restates:
        return Grader(scorer.score, dataset.abstained)
    return Grader(
        partial(_score_restated, dataset.name, scorer),
        lambda reply: dataset.abstained(answer(dataset.name, reply)),
    )


def _unscored(reply: str, answers: Sequence[str]) -> None:
    """Random tokens have no answer."""


def _score_restated(dataset: str, scorer: Scorer, reply: str, answers: Sequence[str]) -> float:
    return scorer.score(answer(dataset, reply), answers)
