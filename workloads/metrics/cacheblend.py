"""CacheBlend's two metrics (YaoJiayi/CacheBlend, example/utils.py).

Their numbers are not comparable with LongBench's: F1 counts token ids instead of words, so it
depends on the model's tokenizer, and Rouge-L stems words and counts each as often as it occurs.
"""

from collections import Counter
from collections.abc import Callable

from picbench.errors import ConfigError
from picbench.workloads.metrics.f1 import words
from picbench.workloads.prompts.tokens import Tokenizer, encode

Metric = Callable[[str, str], float]


def token_f1(tokenizer: Tokenizer) -> Metric:
    """Return the F1 of (reply, answer) over token ids, from 0 to 1.

    Texts are normalised as for word F1 and encoded without special tokens. Of the reply its
    first line counts, and of that no more than Yes or No where it starts with these letters
    (also in Norway: the original's rule). Two texts without tokens score 1.
    """

    def metric(prediction: str, reference: str) -> float:
        texts = [" ".join(words(text)) for text in (_reply(prediction), reference)]
        predicted, expected = encode(tokenizer, texts)
        if not predicted or not expected:
            return float(predicted == expected)
        common = (Counter(predicted) & Counter(expected)).total()
        return 2 * common / (len(predicted) + len(expected))

    return metric


def stemmed_rouge_l() -> Metric:
    """Return the Rouge-L F-measure of (reply, answer) by `rouge_score` with its stemmer.

    Raises ConfigError where that package is missing.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "`scoring=cacheblend` needs the package rouge-score",
            hint="pip install 'picbench[cacheblend]'",
        ) from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)

    def metric(prediction: str, reference: str) -> float:
        return float(scorer.score(reference, prediction)["rougeL"].fmeasure)

    return metric


def _reply(prediction: str) -> str:
    line = prediction.lstrip("\n").partition("\n")[0]
    if line.startswith(("Yes", "yes")):
        return "Yes"
    return "No" if line.lstrip().startswith(("No", "no")) else line
