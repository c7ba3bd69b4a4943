"""The metric that scores the replies of a data set: its own, or one by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

from picbench.errors import ConfigError
from picbench.workloads.datasets import Dataset
from picbench.workloads.metrics.cacheblend import Metric, stemmed_rouge_l, token_f1
from picbench.workloads.metrics.chinese import chinese
from picbench.workloads.metrics.f1 import exact_match, f1, string_match
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.prompts.tokens import Encoder, Tokenizer
from picbench.workloads.sample import Sample

Rule = Literal["longbench", "longbench-zh", "cacheblend"]
RULES: tuple[Rule, ...] = get_args(Rule)

#: What is measured beside the score of a reply.
LIKELIHOOD, FIDELITY = "likelihood", "fidelity"

_Load = Callable[[], Tokenizer]

#: Metrics by name: word F1, exact match, Rouge-L, RULER's, LongBench's for Chinese, CacheBlend's F1
#: over token ids and Rouge-L over stemmed words. A tokenizer is loaded where tokens count.
METRICS: Mapping[str, Callable[[_Load], Metric]] = MappingProxyType(
    {
        "f1": lambda load: f1,
        "em": lambda load: exact_match,
        "rouge-l": lambda load: rouge_l,
        "string-match": lambda load: string_match,
        "f1-zh": lambda load: chinese("f1-zh"),
        "rouge-l-zh": lambda load: chinese("rouge-l-zh"),
        "f1-cacheblend": lambda load: token_f1(load()),
        "rouge-l-cacheblend": lambda load: stemmed_rouge_l(),
    }
)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What `scoring` asks for: the rule of scores, the likelihood of right answers, fidelity."""

    rule: Rule = "longbench"
    likelihood: bool = False
    fidelity: bool = False

    @property
    def forces(self) -> bool:
        """Whether engines are sent replies."""
        return self.likelihood or self.fidelity


def parse_scoring(text: str) -> Scoring:
    """Read one word of `RULES`, ``likelihood``, ``fidelity``, or several, separated by commas.

    Raises ConfigError for anything else.
    """
    words = [word.strip() for word in text.split(",")]
    rules = [rule for rule in RULES if rule in words]
    others = set(words) - {*rules, LIKELIHOOD, FIDELITY}
    if others or len(rules) > 1 or len(words) > len(set(words)):
        raise ConfigError(
            f"`scoring` {text!r}: not like longbench or longbench,likelihood",
            hint=f"one of {', '.join(RULES)} and, to measure more, {LIKELIHOOD}, {FIDELITY}",
        )
    return Scoring(rules[0] if rules else RULES[0], LIKELIHOOD in words, FIDELITY in words)


def right_answers(samples: Iterable[Sample], tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """The token ids of each sample's first right answer, as many as its reply may have.

    A space precedes it where the prompt ends without one. Raises ConfigError for a sample without
    an answer.
    """
    encoder, found = Encoder(tokenizer), {}
    for sample in samples:
        text = sample.answers[0].strip() if sample.answers else ""
        if not text:
            raise ConfigError(
                f"`scoring={LIKELIHOOD}`: sample {sample.id} has no right answer",
                hint="leave it out, or take rows with answers",
            )
        end = encoder.decode(sample.tokens[-1:])[-1:]
        [ids] = encoder([text if end.isspace() or not end else f" {text}"])
        found[sample.id] = ids[: sample.max_tokens]
    return found


@dataclass(frozen=True, slots=True)
class Scorer:
    """The name of a data set's metric, and the metric.

    `score` takes a reply and the right answers and returns the best score, from 0 to 1.
    """

    metric: str
    score: Callable[[str, Sequence[str]], float]


def find_scorer(dataset: Dataset, rule: Rule, load: _Load) -> Scorer:
    """Return LongBench's scorer for `dataset`, that for Chinese, or CacheBlend's over token ids.

    String match is the same under all rules. `load` is called where tokens count. Raises
    ConfigError where a package is missing.
    """
    if rule == "longbench" or dataset.metric == "string-match":
        return Scorer(dataset.metric, dataset.score)
    return scorer_by_name(dataset, f"{dataset.metric}-{rule.removeprefix('longbench-')}", load)


def scorer_by_name(dataset: Dataset, metric: str, load: _Load) -> Scorer:
    """Return the scorer of `dataset` by one of METRICS; `load` is called where tokens count.

    Raises ConfigError where a package is missing.
    """
    name = metric.replace("-cacheblend", " (CacheBlend)")
    return Scorer(name, partial(dataset.best, METRICS[metric](load)))
