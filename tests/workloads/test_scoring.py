"""What `scoring` asks for, and right answers in tokens."""

from dataclasses import replace

import pytest

from picbench.errors import ConfigError
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.scoring import RULES, Scoring, parse_scoring, right_answers


def sample(tokenizer: Tokenizer, prompt: str, answer: str = "New York", room: int = 9) -> Sample:
    ids = tuple(tokenizer([prompt], add_special_tokens=False)["input_ids"][0])
    segments = (SampleSegment("text", prompt, ids),)
    return Sample(prompt, "musique", segments, (answer, "another"), room)


def test_words_come_alone_or_together() -> None:
    assert [parse_scoring(rule) for rule in RULES] == [Scoring(rule) for rule in RULES]
    assert parse_scoring("likelihood") == Scoring("longbench", likelihood=True)
    assert parse_scoring("fidelity") == Scoring(fidelity=True)
    every = Scoring("longbench-zh", likelihood=True, fidelity=True)
    assert parse_scoring("longbench-zh,likelihood,fidelity") == every
    for both in ("cacheblend,likelihood", "likelihood, cacheblend"):
        assert parse_scoring(both) == Scoring("cacheblend", likelihood=True)


@pytest.mark.parametrize(
    ("prompt", "answer"), [("Answer:", " New York"), ("Answer: ", "New York"), ("?\n", "New York")]
)
def test_answers_go_on_where_prompts_end(
    tiny_tokenizer: Tokenizer, prompt: str, answer: str
) -> None:
    found = right_answers([sample(tiny_tokenizer, prompt, " New York\n")], tiny_tokenizer)
    assert tiny_tokenizer.decode(list(found[prompt])) == answer


def test_answers_are_as_long_as_replies(tiny_tokenizer: Tokenizer) -> None:
    long = sample(tiny_tokenizer, "Who?", "the people " * 30, room=7)
    assert len(right_answers([long], tiny_tokenizer)["Who?"]) == 7


def test_a_sample_without_an_answer_is_refused(tiny_tokenizer: Tokenizer) -> None:
    without = sample(tiny_tokenizer, "Who?")
    for answers in ((), (" ",)):
        with pytest.raises(ConfigError, match="sample Who\\? has no right answer"):
            right_answers([replace(without, answers=answers)], tiny_tokenizer)
