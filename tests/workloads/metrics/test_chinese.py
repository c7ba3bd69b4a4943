"""LongBench's metrics for Chinese, and which answers they are for."""
# ruff: noqa: RUF001

import re
import string
from collections import Counter
from typing import Any

import pytest

from picbench.errors import ConfigError
from picbench.workloads.datasets import find
from picbench.workloads.metrics.chinese import chinese, unspaced
from picbench.workloads.scoring import find_scorer, scorer_by_name


def no_tokenizer() -> Any:
    raise AssertionError("no tokens count")


@pytest.mark.parametrize(
    ("answers", "language"),
    [
        (["Oslo"], ""),
        (["Tokyo (\u6771\u4eac)"], ""),
        (["\u5317\u4eac", "Beijing"], ""),
        (["1949\u5e74"], ""),
        (["A\u5e74"], ""),
        (["A\u5e74\u5e74"], "Chinese"),
        ([], ""),
        (["\uc11c\uc6b8"], ""),
        (["\u5317\u4eac"], "Chinese"),
        ([" \u5317\u4eac\u5e02 ", "\u5317\u4eac"], "Chinese"),
        (["\u6771\u4eac\u306e\u99c5"], "Japanese or Thai"),
        (["\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e"], "Japanese or Thai"),
    ],
)
def test_the_language_of_answers(answers: list[str], language: str) -> None:
    assert unspaced(answers) == language


def test_without_jieba_the_metric_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    with pytest.raises(ConfigError, match="need the package jieba") as caught:
        scorer_by_name(find("qa"), "f1-zh", no_tokenizer)
    assert caught.value.hint == "pip install 'picbench[chinese]'"


@pytest.mark.parametrize(
    ("reply", "gold", "expected"),
    [
        # A word, whatever stands around it
        ("北京。", "北京", 1.0),
        ("「北京」", "北京", 1.0),
        ("", "北京", 0.0),
        ("。", "北京", 0.0),
        # 他 在 北京 大学 读书 (or 北京大学): one of the two
        ("上海", "北京", 0.0),
        # 中国 首都 | 首都: 1 of 2, 1 of 1
        ("中国首都", "首都", 2 / 3),
        ("NBA 总决赛", "nba总决赛", 1.0),
    ],
)
def test_f1_over_chinese_words(reply: str, gold: str, expected: float) -> None:
    pytest.importorskip("jieba")
    scorer = find_scorer(find("qa"), "longbench-zh", no_tokenizer)
    assert scorer.metric == "f1-zh"
    assert scorer.score(reply, [gold]) == pytest.approx(expected)


REPLIES = [
    "北京市是中华人民共和国的首都。",
    "他1949年出生在“上海”（沪），后来去了New York。",
    "不知道……",
    "李白、杜甫和白居易；都是唐代的诗人！",
    "",
]


def test_the_score_is_longbenchs() -> None:
    """Against its definition, written out: jieba's words, each normalised, as a multiset."""
    jieba = pytest.importorskip("jieba")
    known = string.punctuation + (
        "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕"
        "〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
    )

    def words(text: str) -> Counter[str]:
        cut = jieba.cut(text, cut_all=False)
        kept = ("".join(letter for letter in word.lower() if letter not in known) for word in cut)
        return Counter(word for one in kept if (word := re.sub(r"\s", "", one)))

    score = chinese("f1-zh")
    for reply in REPLIES:
        for gold in REPLIES:
            said, wanted = words(reply), words(gold)
            common = (said & wanted).total()
            f1 = 2 * common / (said.total() + wanted.total()) if common else 0.0
            assert score(reply, gold) == pytest.approx(f1)


def test_rouge_over_chinese_words() -> None:
    pytest.importorskip("jieba")
    scorer = find_scorer(find("samsum"), "longbench-zh", no_tokenizer)
    assert scorer.metric == "rouge-l-zh"
    # 他 去 了 上海: 3 of 4
    assert scorer.score("他去了北京", ["他去了上海"]) == pytest.approx(0.75)
    assert scorer.score("他去了北京", ["他去了北京"]) == pytest.approx(1.0)
