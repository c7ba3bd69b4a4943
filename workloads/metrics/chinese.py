"""LongBench's metrics for Chinese, over jieba's words (qa_f1_zh_score, rouge_zh_score)."""

import re
import string
from collections.abc import Callable, Sequence

from picbench.errors import ConfigError
from picbench.workloads.metrics.cacheblend import Metric
from picbench.workloads.metrics.f1 import overlap
from picbench.workloads.metrics.rouge import rouge_l
from picbench.workloads.yaml_data import read_data

_OTHERS = re.compile(r"[\u3041-\u30ff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
_UNSPACED = re.compile(rf"[\u3400-\u9fff\U00020000-\U0003ffff]|{_OTHERS.pattern}")


def unspaced(answers: Sequence[str]) -> str:
    """The language of answers that have no spaces between words; empty where one has them."""
    if not answers or any(2 * len(_UNSPACED.findall(one)) <= len(one.strip()) for one in answers):
        return ""
    return "Japanese or Thai" if any(map(_OTHERS.search, answers)) else "Chinese"


def chinese(metric: str) -> Metric:
    """Return ``f1-zh``, over words without punctuation, or ``rouge-l-zh``; ConfigError if no jieba.

    Both take a reply and an answer, and return a score from 0 to 1.
    """
    try:
        import jieba
    except ImportError as error:
        hint = "pip install 'picbench[chinese]'"
        raise ConfigError("metrics for Chinese need the package jieba", hint=hint) from error
    jieba.setLogLevel("WARNING")  # It says at length that it reads its dictionary.
    cut: Callable[[str], list[str]] = jieba.Tokenizer().lcut
    no_punctuation = dict.fromkeys(
        map(ord, string.punctuation + read_data("metrics", "chinese")["punctuation"])
    )

    def known(text: str) -> list[str]:
        found = ("".join(word.lower().translate(no_punctuation).split()) for word in cut(text))
        return [word for word in found if word]

    if metric == "f1-zh":
        return lambda prediction, reference: overlap(known(prediction), known(reference))
    return lambda prediction, reference: rouge_l(
        " ".join(cut(prediction)), " ".join(cut(reference))
    )
